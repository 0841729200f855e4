"""A log in Kafka; the only file that knows its client.

Writing: idempotent, acknowledged by all replicas in sync. Reading: assigned partitions, no group, no committed
offsets: the caller keeps them. lz4 before gzip, and never zstd: kafka-python unpacks at most 1 MiB of a zstd batch.
Both ends survive a broker that goes away and comes back; calls made meanwhile raise BusError.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigFilterType, ConfigResource, ConfigResourceType
from kafka.codec import has_lz4
from kafka.errors import KafkaConfigurationError, KafkaError, KafkaTimeoutError, TopicAlreadyExistsError
from kafka.net.compat import KafkaNetClient

from omnidraft.config import KafkaSettings
from omnidraft.errors import BusError
from omnidraft.ports import Message, Offsets, Outgoing, Polled, TopicFacts

MAX_MESSAGE_BYTES = 2 << 20
"""Twice Kafka's default, so that a dead letter fits with the headers it gains."""
BATCH_BYTES = 256 << 10
RECONNECT_MAX_MS = 1_000


@contextmanager
def _translated(doing: str, servers: str) -> Iterator[None]:
    """Turns what the client raises into BusError."""
    try:
        yield
    except KafkaConfigurationError:
        raise  # our mistake, which no retry mends
    except (KafkaError, OSError) as exc:
        advice = f"is the broker at {servers} up and reachable? See OMNIDRAFT_LOG; `make kafka` starts a local one"
        raise BusError(f"{doing}: {type(exc).__name__}: {exc} ({advice})") from exc


@contextmanager
def _connection(servers: str, timeout_s: float, access: KafkaSettings) -> Iterator[dict[str, Any]]:
    """Settings that every client of this file shares. A client that cannot be made leaves its thread and sockets
    behind, and callers try again for as long as an outage lasts, so its network part is ended here."""
    networks: list[KafkaNetClient] = []

    def connect(**settings: Any) -> KafkaNetClient:
        networks.append(KafkaNetClient(**settings))
        return networks[-1]

    settings = {
        "bootstrap_servers": servers.split(","),
        "client_id": "omnidraft",
        "bootstrap_timeout_ms": int(timeout_s * 1000),
        "reconnect_backoff_max_ms": RECONNECT_MAX_MS,
        "kafka_client": connect,
        **_credentials(access),
    }
    try:
        yield settings
    except (KafkaError, OSError):
        for network in networks:
            network.close()
            network._manager._net.stop()  # as KafkaAdminClient.close does it
        raise


def _credentials(access: KafkaSettings) -> dict[str, Any]:
    """In the client's words."""
    made: dict[str, Any] = {"security_protocol": access.security.upper()}
    if access.security.startswith("sasl"):
        _keep_client_from_showing_them()
        made |= {"sasl_mechanism": access.mechanism, "sasl_plain_username": access.username}
        made["sasl_plain_password"] = access.password.get_secret_value() if access.password else None
    if access.security.endswith("ssl"):
        files = {"ssl_cafile": access.ca_file, "ssl_certfile": access.cert_file, "ssl_keyfile": access.key_file}
        made |= {name: str(file) for name, file in files.items() if file is not None}
        made["ssl_password"] = access.key_password.get_secret_value() if access.key_password else None
    return made


def _keep_client_from_showing_them() -> None:
    """Its debug lines hold the settings and every request, so the password."""
    client = logging.getLogger("kafka")
    if client.getEffectiveLevel() < logging.INFO:
        client.setLevel(logging.INFO)


def _ensure_topic(servers: str, topic: str, partitions: int, timeout_s: float, access: KafkaSettings) -> None:
    """Create the topic unless it is there; another process may do so at the same time."""
    timeout_ms = int(timeout_s * 1000)
    with _connection(servers, timeout_s, access) as settings:
        admin = KafkaAdminClient(**settings, request_timeout_ms=timeout_ms)
    try:
        if topic in admin.list_topics():
            return
        wanted = {"num_partitions": partitions, "configs": {"max.message.bytes": str(MAX_MESSAGE_BYTES)}}
        admin.create_topics({topic: wanted}, timeout_ms=timeout_ms, wait_for_metadata=True)
    except TopicAlreadyExistsError:
        return
    finally:
        admin.close()


def describe(servers: str, topics: Sequence[str], access: KafkaSettings, timeout_s: float) -> dict[str, TopicFacts]:
    """Those of these topics that exist; none is made. Raises BusError when no broker answers within the timeout."""
    with _translated(f"describing {', '.join(topics)}", servers):
        with _connection(servers, timeout_s, access) as settings:
            admin = KafkaAdminClient(**settings, request_timeout_ms=int(timeout_s * 1000))
        try:
            known = sorted(set(topics) & set(admin.list_topics()))
            if not known:
                return {}
            asked = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in known]
            configs = admin.describe_configs(asked, config_filter=ConfigFilterType.ALL)["topic"]
            sizes = {each["name"]: len(each["partitions"]) for each in admin.describe_topics(known)}
        finally:
            admin.close()
    return {topic: _facts(sizes[topic], configs[topic]) for topic in known}


def _facts(num_partitions: int, config: Mapping[str, Mapping[str, str]]) -> TopicFacts:
    retention_ms = int(config["retention.ms"]["value"])
    return TopicFacts(
        num_partitions,
        max_message_bytes=int(config["max.message.bytes"]["value"]),
        retention_ms=retention_ms if retention_ms >= 0 else None,  # Kafka's -1: for ever
        stamped_by="log" if config["message.timestamp.type"]["value"] == "LogAppendTime" else "writer",
    )


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
    ) -> None:
        """`servers` is host:port[,host:port]; `partitions` counts when the topic has to be created; `access`
        None is in plain text.

        Raises:
            BusError: no broker answers within the timeout.
        """
        self._servers, self._topic = servers, topic
        self._linger_ms, self._timeout_s = linger_ms, request_timeout_s
        self._access = access or KafkaSettings()
        self._producer: KafkaProducer | None = None
        with _translated(f"opening {topic}", servers):
            _ensure_topic(servers, topic, partitions, request_timeout_s, self._access)
            self._producer = self._connect()

    def append(self, messages: Sequence[Outgoing]) -> None:
        deadline = time.monotonic() + self._timeout_s
        with _translated(f"appending to {self._topic}", self._servers):
            self._producer = self._producer or self._connect()
            try:
                self._send(self._producer, messages, deadline)
            except KafkaError:
                self._abandon()  # what it still holds could arrive after the caller's next attempt
                raise

    def close(self) -> None:
        if self._producer is not None:
            with _translated(f"closing {self._topic}", self._servers):
                self._producer.close(timeout=self._timeout_s)
            self._producer = None

    def _connect(self) -> KafkaProducer:
        timeout_ms = int(self._timeout_s * 1000)
        with _connection(self._servers, self._timeout_s, self._access) as settings:
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
    ) -> None:
        """`servers` is host:port[,host:port]; `partitions` counts when the topic has to be created; `access`
        None is in plain text.

        Raises:
            BusError: no broker answers within the timeout.
        """
        self._servers, self._topic, self._timeout_s = servers, topic, request_timeout_s
        self._access = access or KafkaSettings()
        with _translated(f"opening {topic}", servers):
            _ensure_topic(servers, topic, partitions, request_timeout_s, self._access)
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
        with _translated(f"seeking in {self._topic}", self._servers):
            found = self._consumer.beginning_offsets(list(self._partitions.values()))
        firsts = {name.partition: offset for name, offset in found.items()}
        ends = self.end_offsets()
        for partition, offset in offsets.items():
            if partition not in ends or not firsts[partition] <= offset <= ends[partition]:
                held = f"it holds {firsts.get(partition)} to {ends.get(partition)}"
                raise BusError(f"{self._topic}[{partition}]: offset {offset} lies outside the log, {held}")
        for partition, name in self._partitions.items():
            self._consumer.seek(name, offsets.get(partition, firsts[partition]))

    def poll(self, max_messages: int, timeout_s: float) -> Polled:
        with _translated(f"polling {self._topic}", self._servers):
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_messages)
        if polled:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > self._timeout_s:
            self.end_offsets()  # the client hides a broker that is gone as silence
        messages = tuple(_message(record) for records in polled.values() for record in records)
        return Polled(messages, {message.partition: message.offset + 1 for message in messages})

    def end_offsets(self) -> Offsets:
        with _translated(f"asking for the end of {self._topic}", self._servers):
            found = self._consumer.end_offsets(list(self._partitions.values()))
        self._heard_s = time.monotonic()
        return {name.partition: offset for name, offset in found.items()}

    def close(self) -> None:
        with _translated(f"closing {self._topic}", self._servers):
            self._consumer.close(autocommit=False)

    def _connect(self) -> KafkaConsumer:
        with _connection(self._servers, self._timeout_s, self._access) as settings:
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
