"""Settings that all our Kafka clients share: connection, credentials, translated errors, and topics."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import ConfigFilterType, ConfigResource, ConfigResourceType
from kafka.errors import (
    AuthorizationError,
    KafkaConfigurationError,
    KafkaError,
    LogTruncationError,
    MessageSizeTooLargeError,
    OffsetOutOfRangeError,
    RecordListTooLargeError,
    TopicAlreadyExistsError,
)
from kafka.net.compat import KafkaNetClient

from omnidraft.bus.kafka_tokens import OAuthTokens
from omnidraft.config import KafkaSettings
from omnidraft.errors import BusError, LogTruncated, MessageTooLarge, OffsetOutOfRange
from omnidraft.ports import COMPACTION_LAG_S, TopicFacts

MAX_MESSAGE_BYTES = 2 << 20
"""Twice Kafka's default, so that a dead letter fits with its additional headers."""
RECONNECT_MAX_MS = 1_000
LOOK_S = 2.0
"""How long a call that failed asks the broker whether the topic is gone."""
FOR_EVER = "-1"
"""The value for unlimited retention in a topic's settings."""
SEGMENTS_PER_RETENTION = 8
"""Kafka deletes whole segments, so messages stay for up to an eighth of the retention longer."""
MIN_SEGMENT_MS, MAX_SEGMENT_MS = 60_000, 7 * 24 * 3_600_000


@contextmanager
def translate_errors(action: str, servers: str) -> Iterator[None]:
    """Translate the errors of the client into BusError."""
    try:
        yield
    except KafkaConfigurationError:
        raise  # our mistake, which no retry repairs
    except OffsetOutOfRangeError as exc:
        raise OffsetOutOfRange(f"{action}: {exc}") from exc
    except LogTruncationError as exc:
        raise LogTruncated(f"{action}: {exc}") from exc
    except (MessageSizeTooLargeError, RecordListTooLargeError) as exc:
        raise MessageTooLarge(f"{action}: {exc}; does the topic's max.message.bytes allow 1 MB?") from exc
    except (KafkaError, OSError) as exc:
        advice = f"is the broker at {servers} up and reachable? See OMNIDRAFT_LOG"
        raise BusError(f"{action}: {str(exc) or type(exc).__name__} ({advice})") from exc


@contextmanager
def connection(servers: str, timeout_s: float, access: KafkaSettings) -> Iterator[dict[str, Any]]:
    """Yield the settings that every client shares. A client whose constructor fails leaves its thread and sockets
    behind, and callers try again for as long as an outage lasts, so its network part is closed here."""
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
    """Return the credentials as settings of the client. Raises KafkaConnectionError where there is no token."""
    settings: dict[str, Any] = {"security_protocol": access.security.upper()}
    if access.security != "plaintext":
        _hide_credentials_from_client_logs()
    if access.security.startswith("sasl"):
        settings["sasl_mechanism"] = access.mechanism
        if access.mechanism == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = tokens = OAuthTokens(access)
            tokens.token()  # the client would not say why it gets none
        else:
            settings["sasl_plain_username"] = access.username
            settings["sasl_plain_password"] = access.password.get_secret_value() if access.password else None
    if access.security.endswith("ssl"):
        files = {"ssl_cafile": access.ca_file, "ssl_certfile": access.cert_file, "ssl_keyfile": access.key_file}
        settings |= {name: str(file) for name, file in files.items() if file is not None}
        settings["ssl_password"] = access.key_password.get_secret_value() if access.key_password else None
    return settings


def _hide_credentials_from_client_logs() -> None:
    """Raise the client's log level: its debug lines contain the settings and every request, so the password."""
    client = logging.getLogger("kafka")
    if client.getEffectiveLevel() < logging.INFO:
        client.setLevel(logging.INFO)


@contextmanager
def _admin(servers: str, access: KafkaSettings, timeout_s: float) -> Iterator[KafkaAdminClient]:
    with connection(servers, timeout_s, access) as settings:
        admin = KafkaAdminClient(**settings, request_timeout_ms=int(timeout_s * 1000))
    try:
        yield admin
    finally:
        admin.close()


class KafkaTopic(ABC):
    """One topic, which is created if there is none, and again where somebody deleted it meanwhile."""

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        partitions: int = 1,
        request_timeout_s: float = 10.0,
        access: KafkaSettings | None = None,
        keep_s: float | None = None,
        is_compacted: bool = False,
    ) -> None:
        """
        Args:
            servers: host:port[,host:port].
            partitions: number of partitions, when the topic has to be created.
            access: security and credentials; None: plain text.
            keep_s: retention in seconds, when the topic has to be created; inf: unlimited, None: the broker's default.
            is_compacted: whether it keeps the newest message of each key instead, likewise.

        Raises:
            BusError: no broker answers within the timeout.
        """
        self._servers, self._topic, self._timeout_s = servers, topic, request_timeout_s
        self._access = access = access or KafkaSettings()
        self._ensure = partial(
            _ensure_topic, servers, topic, partitions, access=access, keep_s=keep_s, is_compacted=is_compacted
        )
        with translate_errors(f"opening {topic}", servers):
            self._ensure(timeout_s=request_timeout_s)
            self._open()

    @contextmanager
    def _asking(self, action: str) -> Iterator[None]:
        """Translate errors. Where the topic is gone, make it again, for the next call."""
        try:
            with translate_errors(f"{action} {self._topic}", self._servers):
                yield
        except (MessageTooLarge, OffsetOutOfRange):
            raise
        except BusError as exc:
            if isinstance(exc.__cause__, AuthorizationError) or (loss := self._mended_loss()) is None:
                raise
            raise BusError(f"{action} {self._topic}: {loss}") from exc

    def _mended_loss(self) -> str | None:
        """Make the topic again if it is gone, which the client cannot tell from a broker that does not answer. Return
        what to say of that; None: it is there, or nobody knows."""
        try:
            was_gone = self._ensure(timeout_s=min(LOOK_S, self._timeout_s))
        except AuthorizationError:
            return "the topic is gone, and this login may not make it again: run deploy/kafka/grant.py"
        except (KafkaError, OSError):
            return None
        return "the topic was deleted; it is made again, without its messages" if was_gone else None

    @abstractmethod
    def _open(self) -> None:
        """Connect to the topic, which exists."""


def _ensure_topic(
    servers: str,
    topic: str,
    partitions: int,
    timeout_s: float,
    access: KafkaSettings,
    keep_s: float | None,
    is_compacted: bool,
) -> bool:
    """Create the topic unless it exists, and return whether it did not; another process may do so at the same time.

    Args:
        keep_s: retention in seconds, inf for unlimited; None: the broker's default.
        is_compacted: keep the newest message of each key instead.
    """
    with _admin(servers, access, timeout_s) as admin:
        if topic in admin.list_topics():
            return False
        new_topic = {"num_partitions": partitions, "configs": _configs(keep_s, is_compacted)}
        with suppress(TopicAlreadyExistsError):
            admin.create_topics({topic: new_topic}, timeout_ms=int(timeout_s * 1000), wait_for_metadata=True)
        return True


def _configs(keep_s: float | None, is_compacted: bool) -> dict[str, str]:
    """Return a new topic's settings. The broker's clock stamps messages, so that a writer whose clock is wrong neither
    keeps them for ever nor has them deleted at once."""
    configs = {
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        "cleanup.policy": "compact" if is_compacted else "delete",
        "message.timestamp.type": "LogAppendTime",
    }
    if is_compacted:
        lag_ms = str(int(COMPACTION_LAG_S * 1000))
        return configs | {"min.compaction.lag.ms": lag_ms, "segment.ms": lag_ms, "min.cleanable.dirty.ratio": "0.1"}
    if keep_s is None:
        return configs
    if math.isinf(keep_s):
        return configs | {"retention.ms": FOR_EVER, "retention.bytes": FOR_EVER}
    keep_ms = int(keep_s * 1000)
    segment_ms = min(max(keep_ms // SEGMENTS_PER_RETENTION, MIN_SEGMENT_MS), MAX_SEGMENT_MS)
    return configs | {"retention.ms": str(keep_ms), "segment.ms": str(segment_ms)}


def topic_id(servers: str, topic: str, access: KafkaSettings, timeout_s: float) -> str:
    """Return the topic id that the cluster assigned. Raises BusError when it does not answer or has none."""
    with translate_errors(f"asking for the identity of {topic}", servers), _admin(servers, access, timeout_s) as admin:
        descriptions = admin.describe_topics([topic])
    if not descriptions or not descriptions[0].get("topic_id"):
        raise BusError(f"{topic} has no identity; is it there, and is the broker Kafka 2.8 or newer?")
    return str(descriptions[0]["topic_id"])


def list_topics(servers: str, access: KafkaSettings, timeout_s: float) -> set[str]:
    """Return the topics that this login may read or write. Raises BusError when no broker answers in time."""
    with translate_errors("listing topics", servers), _admin(servers, access, timeout_s) as admin:
        return set(admin.list_topics())


def describe(servers: str, topics: Sequence[str], access: KafkaSettings, timeout_s: float) -> dict[str, TopicFacts]:
    """Describe these topics, as far as they exist; none is created.

    Raises:
        BusError: no broker answers in time, or this login may not read the settings of a topic.
    """
    action = f"describing {', '.join(topics)}"
    with translate_errors(action, servers), _admin(servers, access, timeout_s) as admin:
        known = sorted(set(topics) & set(admin.list_topics()))
        if not known:
            return {}
        resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in known]
        configs = admin.describe_configs(resources, config_filter=ConfigFilterType.ALL)["topic"]
        sizes = {each["name"]: len(each["partitions"]) for each in admin.describe_topics(known)}
    if denied := [topic for topic in known if not configs[topic]]:  # as Kafka answers for want of DescribeConfigs
        raise BusError(f"this login may not read the settings of {', '.join(denied)}: use that of omnidraft-operator")
    return {topic: _facts(sizes[topic], configs[topic]) for topic in known}


def _facts(num_partitions: int, config: Mapping[str, Mapping[str, str]]) -> TopicFacts:
    is_compacted = config["cleanup.policy"]["value"] == "compact"
    retention_ms = -1 if is_compacted else int(config["retention.ms"]["value"])
    return TopicFacts(
        num_partitions,
        max_message_bytes=int(config["max.message.bytes"]["value"]),
        retention_ms=retention_ms if retention_ms >= 0 else None,  # Kafka's -1: for ever
        stamped_by="log" if config["message.timestamp.type"]["value"] == "LogAppendTime" else "writer",
    )
