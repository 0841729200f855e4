"""What every Kafka client of ours has in common: how it connects, who it is, what its errors become, and topics."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import ConfigFilterType, ConfigResource, ConfigResourceType
from kafka.errors import KafkaConfigurationError, KafkaError, OffsetOutOfRangeError, TopicAlreadyExistsError
from kafka.net.compat import KafkaNetClient

from omnidraft.config import KafkaSettings
from omnidraft.errors import BusError, OffsetOutOfRange
from omnidraft.ports import TopicFacts

MAX_MESSAGE_BYTES = 2 << 20
"""Twice Kafka's default, so that a dead letter fits with the headers it gains."""
RECONNECT_MAX_MS = 1_000
FOR_EVER = "-1"
"""In a topic's settings."""
SEGMENTS_PER_RETENTION = 8
"""Kafka deletes whole segments, so messages stay for up to an eighth longer than they are kept."""
MIN_SEGMENT_MS, MAX_SEGMENT_MS = 60_000, 7 * 24 * 3_600_000


@contextmanager
def translate_errors(doing: str, servers: str) -> Iterator[None]:
    """Turns what the client raises into BusError."""
    try:
        yield
    except KafkaConfigurationError:
        raise  # our mistake, which no retry mends
    except OffsetOutOfRangeError as exc:
        raise OffsetOutOfRange(f"{doing}: {exc}") from exc
    except (KafkaError, OSError) as exc:
        advice = f"is the broker at {servers} up and reachable? See OMNIDRAFT_LOG; `make kafka` starts a local one"
        raise BusError(f"{doing}: {type(exc).__name__}: {exc} ({advice})") from exc


@contextmanager
def connection(servers: str, timeout_s: float, access: KafkaSettings) -> Iterator[dict[str, Any]]:
    """Settings that every client shares. A client that cannot be made leaves its thread and sockets
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
        _hide_credentials_from_client_logs()
        made |= {"sasl_mechanism": access.mechanism, "sasl_plain_username": access.username}
        made["sasl_plain_password"] = access.password.get_secret_value() if access.password else None
    if access.security.endswith("ssl"):
        files = {"ssl_cafile": access.ca_file, "ssl_certfile": access.cert_file, "ssl_keyfile": access.key_file}
        made |= {name: str(file) for name, file in files.items() if file is not None}
        made["ssl_password"] = access.key_password.get_secret_value() if access.key_password else None
    return made


def _hide_credentials_from_client_logs() -> None:
    """Its debug lines hold the settings and every request, so the password."""
    client = logging.getLogger("kafka")
    if client.getEffectiveLevel() < logging.INFO:
        client.setLevel(logging.INFO)


def ensure_topic(
    servers: str, topic: str, partitions: int, timeout_s: float, access: KafkaSettings, keep_s: float | None
) -> None:
    """Create the topic unless it is there; another process may do so at the same time.

    Args:
        keep_s: seconds that its messages are kept, inf for ever; None: as the broker does.
    """
    timeout_ms = int(timeout_s * 1000)
    with connection(servers, timeout_s, access) as settings:
        admin = KafkaAdminClient(**settings, request_timeout_ms=timeout_ms)
    try:
        if topic in admin.list_topics():
            return
        wanted = {"num_partitions": partitions, "configs": _configs(keep_s)}
        admin.create_topics({topic: wanted}, timeout_ms=timeout_ms, wait_for_metadata=True)
    except TopicAlreadyExistsError:
        return
    finally:
        admin.close()


def _configs(keep_s: float | None) -> dict[str, str]:
    """Never compacted: a topic's offsets are counted on to have no gaps. The broker's clock stamps messages, so that a
    writer whose clock is wrong neither keeps them for ever nor has them deleted at once."""
    configs = {
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
    }
    if keep_s is None:
        return configs
    if math.isinf(keep_s):
        return configs | {"retention.ms": FOR_EVER, "retention.bytes": FOR_EVER}
    keep_ms = int(keep_s * 1000)
    segment_ms = min(max(keep_ms // SEGMENTS_PER_RETENTION, MIN_SEGMENT_MS), MAX_SEGMENT_MS)
    return configs | {"retention.ms": str(keep_ms), "segment.ms": str(segment_ms)}


def topic_id(servers: str, topic: str, access: KafkaSettings, timeout_s: float) -> str:
    """What the cluster calls this topic beside its name. Raises BusError when it does not answer or has none."""
    with translate_errors(f"asking for the identity of {topic}", servers):
        with connection(servers, timeout_s, access) as settings:
            admin = KafkaAdminClient(**settings, request_timeout_ms=int(timeout_s * 1000))
        try:
            found = admin.describe_topics([topic])
        finally:
            admin.close()
    if not found or not found[0].get("topic_id"):
        raise BusError(f"{topic} has no identity; is it there, and is the broker Kafka 2.8 or newer?")
    return str(found[0]["topic_id"])


def describe(servers: str, topics: Sequence[str], access: KafkaSettings, timeout_s: float) -> dict[str, TopicFacts]:
    """Those of these topics that exist; none is made. Raises BusError when no broker answers within the timeout."""
    with translate_errors(f"describing {', '.join(topics)}", servers):
        with connection(servers, timeout_s, access) as settings:
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
