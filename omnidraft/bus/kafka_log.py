"""A log in Kafka.

Writing: idempotent, acknowledged by all in-sync replicas, lz4. Reading: assigned partitions, no group and no committed
offsets, which the caller keeps. Uncommitted transactions are read too, since any writer could block a reader that
waited for them. Writers and readers survive a broker that goes away and comes back; calls made meanwhile raise
BusError.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError, LeaderNotAvailableError, UnknownError

from omnidraft.bus.kafka_client import MAX_MESSAGE_BYTES, KafkaTopic, connection, topic_id, translate_errors
from omnidraft.bus.kafka_fetcher import UNREADABLE_ERRORS, TolerantFetcher, first_readable_offset
from omnidraft.errors import BusError, OffsetOutOfRange
from omnidraft.ports import Damage, Message, Offsets, Outgoing, PollResult

logger = logging.getLogger(__name__)

BATCH_BYTES = 256 << 10
ABANDON_S = 1.0
"""How long an append that failed waits for the end of its producer's thread."""
METADATA_MAX_AGE_S = 10
"""Added partitions are detected within this many seconds."""
LINGER_MS = 20
"""How long the messages of an append wait for each other, to be sent together."""


class KafkaWriter(KafkaTopic):
    """Implements ports.LogWriter for one topic."""

    def _open(self) -> None:
        self._producer: KafkaProducer | None = self._connect()

    def append(self, messages: Sequence[Outgoing]) -> None:
        deadline = time.monotonic() + self._timeout_s
        with self._asking("appending to"):
            self._producer = self._producer or self._connect()
            try:
                self._send(self._producer, messages, deadline)
            except KafkaError:
                self._abandon()  # else its unsent messages could arrive after the caller's next attempt
                raise

    def close(self) -> None:
        if self._producer is not None:
            with translate_errors(f"closing {self._topic}", self._servers):
                self._producer.close(timeout=self._timeout_s)
            self._producer = None

    def _connect(self) -> KafkaProducer:
        timeout_ms = int(self._timeout_s * 1000)
        with connection(self._servers, self._timeout_s, self._access) as settings:
            return KafkaProducer(
                **settings,
                acks="all",
                enable_idempotence=True,
                compression_type="lz4",
                metrics_enabled=False,
                linger_ms=LINGER_MS,
                batch_size=BATCH_BYTES,
                max_request_size=MAX_MESSAGE_BYTES,
                max_block_ms=timeout_ms,
                request_timeout_ms=timeout_ms,
                delivery_timeout_ms=timeout_ms + LINGER_MS,
            )

    def _send(self, producer: KafkaProducer, messages: Sequence[Outgoing], deadline: float) -> None:
        pending = [
            producer.send(self._topic, each.value, each.key, list(each.headers.items()), partition=each.partition)
            for each in messages
        ]
        with suppress(UnknownError):  # of a batch that was split, as the topic takes none so large; its parts follow
            producer.flush(timeout=max(0.001, deadline - time.monotonic()))  # nothing follows, so do not linger
        for future in pending:
            future.get(timeout=max(0.001, deadline - time.monotonic()))

    def _abandon(self) -> None:
        """End the producer with its thread and connections; it writes nothing more."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        producer._sender.force_close()  # `close` alone waits for unsent messages first, and gives up before this
        producer._sender.join(ABANDON_S)
        with suppress(KafkaTimeoutError):  # the thread waits for a broker still; it ends by itself
            producer.close(timeout=0)


class KafkaReader(KafkaTopic):
    """Implements ports.LogReader for one topic."""

    def _open(self) -> None:
        self._consumer = self._connect()
        self._active_partitions: set[int] = set()
        """Partitions that returned records since the last check for gaps."""
        self._checked_s = time.monotonic()
        try:
            names = self._consumer.partitions_for_topic(self._topic)
            if not names:
                raise KafkaTimeoutError(f"topic {self._topic} has no partition with a leader")
            self._assign(names)
            self.seek({})
        except BaseException:
            self.close()  # its thread and connections, which nobody else can reach
            raise

    def partitions(self) -> tuple[int, ...]:
        return tuple(self._partitions)

    def seek(self, offsets: Offsets) -> None:
        self._read_added_partitions()
        firsts, ends = self._first_offsets(self._partitions), self.end_offsets()
        for partition, offset in offsets.items():
            if partition not in ends or not firsts[partition] <= offset <= ends[partition]:
                available = f"it holds {firsts.get(partition)} to {ends.get(partition)}"
                raise OffsetOutOfRange(f"{self._topic}[{partition}]: offset {offset} lies outside the log, {available}")
        self._topic_id = self._newest_topic_id()
        for partition, name in self._partitions.items():
            self._consumer.seek(name, offsets.get(partition, firsts[partition]))

    def seek_back(self, num_messages: int) -> None:
        self._read_added_partitions()
        firsts, ends = self._first_offsets(self._partitions), self.end_offsets()
        for partition, name in self._partitions.items():
            self._consumer.seek(name, max(firsts[partition], ends[partition] - num_messages))

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        self._read_added_partitions()
        if time.monotonic() - self._checked_s > self._timeout_s and (gap := self._skip_gap(self._idle_partitions())):
            return gap
        try:
            with translate_errors(f"polling {self._topic}", self._servers):
                try:
                    polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_messages)
                finally:
                    self._require_same_topic()
        except BusError as exc:
            if isinstance(exc.__cause__, UNREADABLE_ERRORS) and (gap := self._skip_gap(self._partitions)):
                return gap
            raise
        self._active_partitions |= {name.partition for name in polled}
        messages = tuple(item for items in polled.values() for item in items if isinstance(item, Message))
        return PollResult(messages, {name.partition: items[-1].next_offset for name, items in polled.items()})

    def first_offsets(self) -> Offsets:
        return self._first_offsets(self._partitions)

    def identity(self) -> str:
        with self._asking("asking for the identity of"):
            return topic_id(self._servers, self._topic, self._access, self._timeout_s)

    def end_offsets(self) -> Offsets:
        return self._offsets("end", self._consumer.end_offsets, self._partitions)

    def close(self) -> None:
        with translate_errors(f"closing {self._topic}", self._servers):
            self._consumer.close(autocommit=False)

    def _idle_partitions(self) -> set[int]:
        """Return the partitions without records since the last call."""
        idle, self._active_partitions = self._partitions.keys() - self._active_partitions, set()
        return idle

    def _skip_gap(self, partitions: Iterable[int]) -> PollResult | None:
        """If one of these partitions is at offsets that the broker cannot read, seek behind them and return the damage.

        Raises:
            BusError: the broker is gone, which the client reports as an empty poll.
        """
        firsts, ends, self._checked_s = self._first_offsets(self._partitions), self.end_offsets(), time.monotonic()
        for partition in partitions:
            position = self._position(partition)
            if position is not None and firsts[partition] <= position < ends[partition]:
                readable = self._first_readable_offset(partition, position, ends[partition])
                if readable > position:
                    self._consumer.seek(self._partitions[partition], readable)
                    return _gap_polled(partition, position, readable)
        return None

    def _newest_topic_id(self) -> object:
        """Return the topic's id as the client heard it last; None while the topic is gone."""
        return self._consumer._cluster.topic_id(self._topic)

    def _require_same_topic(self) -> None:
        """Raise OffsetOutOfRange where the topic was deleted and made again since the last seek: the offsets that are
        to be read next are those of other messages."""
        if (newest := self._newest_topic_id()) is not None and newest != self._topic_id:
            raise OffsetOutOfRange(f"polling {self._topic}: the topic was deleted and made again")

    def _position(self, partition: int) -> int | None:
        with translate_errors(f"asking for the position in {self._topic}", self._servers):
            position: int | None = self._consumer.position(self._partitions[partition], int(self._timeout_s * 1000))
        return position

    def _first_readable_offset(self, partition: int, position: int, end: int) -> int:
        with (
            translate_errors(f"looking for what can be read of {self._topic}", self._servers),
            closing(self._connect()) as consumer,
        ):
            readable = first_readable_offset(consumer, self._partitions[partition], position, end)
        return readable

    def _read_added_partitions(self) -> None:
        """Assign partitions that were added to the topic; they are read from their first message."""
        known = self._consumer._cluster.partitions_for_topic(self._topic) or set()  # asks nobody
        if added := known - self._partitions.keys():
            logger.info("%s has more partitions: %s are read from their first message", self._topic, sorted(added))
            firsts = self._first_offsets(added)
            self._assign(known)
            for partition, offset in firsts.items():
                self._consumer.seek(self._partitions[partition], offset)

    def _assign(self, partitions: Iterable[int]) -> None:
        self._partitions = {partition: TopicPartition(self._topic, partition) for partition in sorted(partitions)}
        self._consumer.assign(list(self._partitions.values()))

    def _first_offsets(self, partitions: Iterable[int]) -> Offsets:
        return self._offsets("start", self._consumer.beginning_offsets, partitions)

    def _offsets(
        self, what: str, ask: Callable[[list[TopicPartition]], dict[TopicPartition, int]], partitions: Iterable[int]
    ) -> Offsets:
        """Return what the client tells of these partitions. It leaves out those without a leader, and dies of that."""
        with self._asking(f"asking for the {what} of"):
            try:
                offsets = ask([TopicPartition(self._topic, each) for each in partitions])
            except KeyError as exc:
                raise LeaderNotAvailableError(f"partition {exc} has no leader, or is gone") from exc
        return {name.partition: offset for name, offset in offsets.items()}

    def _connect(self) -> KafkaConsumer:
        with connection(self._servers, self._timeout_s, self._access) as settings:
            consumer = KafkaConsumer(
                **settings,
                metrics_enabled=False,
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="none",
                allow_auto_create_topics=False,
                max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
                fetch_max_wait_ms=200,
                metadata_max_age_ms=METADATA_MAX_AGE_S * 1000,
                request_timeout_ms=int(self._timeout_s * 1000),
            )
        consumer._fetcher = TolerantFetcher(consumer._client, consumer._subscription, **consumer.config)
        return consumer


def _gap_polled(partition: int, first: int, until: int) -> PollResult:
    damage = Damage("corrupt_batch", "the broker cannot read these offsets", until - first)
    return PollResult((Message(partition, first, b"", b"", {}, 0, damage),), {partition: until})
