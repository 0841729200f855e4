"""A log in Kafka.

Writing: idempotent, acknowledged by all replicas in sync. Reading: assigned partitions, no group, no committed
offsets: the caller keeps them. lz4 before gzip, and never zstd: kafka-python unpacks at most 1 MiB of a zstd batch.
Both ends survive a broker that goes away and comes back; calls made meanwhile raise BusError.
"""

import time
from collections.abc import Sequence
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.codec import has_lz4
from kafka.errors import KafkaError, KafkaTimeoutError

from omnidraft.bus.kafka_client import MAX_MESSAGE_BYTES, connection, ensure_topic, topic_id, translated
from omnidraft.config import KafkaSettings
from omnidraft.errors import OffsetOutOfRange
from omnidraft.ports import Message, Offsets, Outgoing, Polled

BATCH_BYTES = 256 << 10


class KafkaWriter:
    """LogWriter of one topic."""

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        partitions: int = 1,
        linger_ms: int = 20,
        request_timeout_s: float = 10.0,
        access: KafkaSettings | None = None,
        keep_s: float | None = None,
    ) -> None:
        """`servers` is host:port[,host:port]; `partitions` and `keep_s` (seconds that messages are kept, inf for ever,
        None as the broker does) count when the topic has to be created; `access` None is in plain text.

        Raises:
            BusError: no broker answers within the timeout.
        """
        self._servers, self._topic = servers, topic
        self._linger_ms, self._timeout_s = linger_ms, request_timeout_s
        self._access = access or KafkaSettings()
        self._producer: KafkaProducer | None = None
        with translated(f"opening {topic}", servers):
            ensure_topic(servers, topic, partitions, request_timeout_s, self._access, keep_s)
            self._producer = self._connect()

    def append(self, messages: Sequence[Outgoing]) -> None:
        deadline = time.monotonic() + self._timeout_s
        with translated(f"appending to {self._topic}", self._servers):
            self._producer = self._producer or self._connect()
            try:
                self._send(self._producer, messages, deadline)
            except KafkaError:
                self._abandon()  # what it still holds could arrive after the caller's next attempt
                raise

    def close(self) -> None:
        if self._producer is not None:
            with translated(f"closing {self._topic}", self._servers):
                self._producer.close(timeout=self._timeout_s)
            self._producer = None

    def _connect(self) -> KafkaProducer:
        timeout_ms = int(self._timeout_s * 1000)
        with connection(self._servers, self._timeout_s, self._access) as settings:
            return KafkaProducer(
                **settings,
                acks="all",
                enable_idempotence=True,
                compression_type="lz4" if has_lz4() else "gzip",
                metrics_enabled=False,
                linger_ms=self._linger_ms,
                batch_size=BATCH_BYTES,
                max_request_size=MAX_MESSAGE_BYTES,
                max_block_ms=timeout_ms,
                request_timeout_ms=timeout_ms,
                delivery_timeout_ms=timeout_ms + self._linger_ms,
            )

    def _send(self, producer: KafkaProducer, messages: Sequence[Outgoing], deadline: float) -> None:
        pending = [
            producer.send(self._topic, message.value, message.key, headers=list(message.headers.items()))
            for message in messages
        ]
        producer.flush(timeout=max(0.001, deadline - time.monotonic()))  # nothing more comes: do not linger
        for sent in pending:
            sent.get(timeout=max(0.001, deadline - time.monotonic()))

    def _abandon(self) -> None:
        producer, self._producer = self._producer, None
        if producer is None:
            return
        try:
            producer.close(timeout=0)
        except KafkaTimeoutError:
            return  # unsent messages: the caller knows, append is about to raise


class KafkaReader:
    """LogReader of one topic."""

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        partitions: int = 1,
        request_timeout_s: float = 10.0,
        access: KafkaSettings | None = None,
        keep_s: float | None = None,
    ) -> None:
        """`servers` is host:port[,host:port]; `partitions` and `keep_s` (seconds that messages are kept, inf for ever,
        None as the broker does) count when the topic has to be created; `access` None is in plain text.

        Raises:
            BusError: no broker answers within the timeout.
        """
        self._servers, self._topic, self._timeout_s = servers, topic, request_timeout_s
        self._access = access or KafkaSettings()
        with translated(f"opening {topic}", servers):
            ensure_topic(servers, topic, partitions, request_timeout_s, self._access, keep_s)
            self._consumer = self._connect()
            names = sorted(self._consumer.partitions_for_topic(topic) or ())
            if not names:
                raise KafkaTimeoutError(f"topic {topic} has no partition with a leader")
        self._partitions = {partition: TopicPartition(topic, partition) for partition in names}
        self._consumer.assign(list(self._partitions.values()))
        self._heard_s = time.monotonic()
        self.seek({})

    def partitions(self) -> tuple[int, ...]:
        return tuple(self._partitions)

    def seek(self, offsets: Offsets) -> None:
        firsts, ends = self.first_offsets(), self.end_offsets()
        for partition, offset in offsets.items():
            if partition not in ends or not firsts[partition] <= offset <= ends[partition]:
                held = f"it holds {firsts.get(partition)} to {ends.get(partition)}"
                raise OffsetOutOfRange(f"{self._topic}[{partition}]: offset {offset} lies outside the log, {held}")
        for partition, name in self._partitions.items():
            self._consumer.seek(name, offsets.get(partition, firsts[partition]))

    def seek_back(self, num_messages: int) -> None:
        firsts, ends = self.first_offsets(), self.end_offsets()
        for partition, name in self._partitions.items():
            self._consumer.seek(name, max(firsts[partition], ends[partition] - num_messages))

    def poll(self, max_messages: int, timeout_s: float) -> Polled:
        with translated(f"polling {self._topic}", self._servers):
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_messages)
        if polled:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > self._timeout_s:
            self.end_offsets()  # the client hides a broker that is gone as silence
        messages = tuple(_message(record) for records in polled.values() for record in records)
        return Polled(messages, {message.partition: message.offset + 1 for message in messages})

    def first_offsets(self) -> Offsets:
        with translated(f"asking for the start of {self._topic}", self._servers):
            found = self._consumer.beginning_offsets(list(self._partitions.values()))
        return {name.partition: offset for name, offset in found.items()}

    def identity(self) -> str:
        return topic_id(self._servers, self._topic, self._access, self._timeout_s)

    def end_offsets(self) -> Offsets:
        with translated(f"asking for the end of {self._topic}", self._servers):
            found = self._consumer.end_offsets(list(self._partitions.values()))
        self._heard_s = time.monotonic()
        return {name.partition: offset for name, offset in found.items()}

    def close(self) -> None:
        with translated(f"closing {self._topic}", self._servers):
            self._consumer.close(autocommit=False)

    def _connect(self) -> KafkaConsumer:
        with connection(self._servers, self._timeout_s, self._access) as settings:
            return KafkaConsumer(
                **settings,
                metrics_enabled=False,
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="none",
                allow_auto_create_topics=False,
                max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
                fetch_max_wait_ms=200,
                request_timeout_ms=int(self._timeout_s * 1000),
            )


def _message(record: Any) -> Message:
    return Message(
        partition=record.partition,
        offset=record.offset,
        key=record.key or b"",
        value=record.value or b"",
        headers={name: value or b"" for name, value in record.headers},
        timestamp_ms=record.timestamp,
    )
