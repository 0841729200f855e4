"""Logs from their URLs, with their credentials, keys and retention."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from omnidraft import extras
from omnidraft.bus import sqlite_topic
from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.config import LogSettings, Settings
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.errors import RequestError
from omnidraft.ports import LogReader, LogWriter, Metrics, RecordCipher, TopicFacts
from omnidraft.traces.record import TraceRecord

if TYPE_CHECKING:
    from omnidraft.bus.key_store import KeyStore
    from omnidraft.bus.tenant_keys import TenantKeys

ELSEWHERE = "run this where the services run, or name --config"
"""What commands that only read or order say where a service would create something."""
SEALED_HEADERS = ("error", "original.")
"""Prefixes of dead-letter headers that may quote users' text."""


class _SqliteLog:
    """A log in a file of this machine."""

    def __init__(self, settings: LogSettings) -> None:
        assert settings.path is not None
        self._settings, self._path = settings, settings.path

    def writer(self, topic: str) -> LogWriter:
        log = self._settings
        keep_s, is_compacted = _retention_s(log, topic), topic == log.control_topic
        return SqliteWriter(self._path, topic, **self._options(topic), keep_s=keep_s, is_compacted=is_compacted)

    def reader(self, topic: str) -> LogReader:
        return SqliteReader(self._path, topic, **self._options(topic))

    def _options(self, topic: str) -> dict[str, Any]:
        return {"partitions": _partitions(self._settings, topic), "timeout_s": self._settings.request_timeout_s}

    def topics(self) -> dict[str, TopicFacts]:
        """Describe the topics. Their writers' settings determine the retention; they are assumed to be these."""
        facts = sqlite_topic.describe(self._path, self._settings.request_timeout_s)
        return {name: self._with_retention(facts[name], name) for name in self._settings.topics if name in facts}

    def _with_retention(self, facts: TopicFacts, topic: str) -> TopicFacts:
        keep_s = _retention_s(self._settings, topic)
        return facts if keep_s in (None, math.inf) else replace(facts, retention_ms=int(keep_s * 1000))

    def topic_names(self) -> set[str]:
        return set(self.topics())


class _KafkaLog:
    """A log of Kafka's."""

    def __init__(self, settings: LogSettings) -> None:
        extras.require("kafka", f"log.url = {settings.url!r}")
        self._settings, self._servers = settings, settings.url.removeprefix("kafka://")

    def writer(self, topic: str) -> LogWriter:
        from omnidraft.bus.kafka_log import KafkaWriter

        return KafkaWriter(self._servers, topic, **self._options(topic))

    def reader(self, topic: str) -> LogReader:
        from omnidraft.bus.kafka_log import KafkaReader

        return KafkaReader(self._servers, topic, **self._options(topic))

    def _options(self, topic: str) -> dict[str, Any]:
        log = self._settings
        return {
            "partitions": _partitions(log, topic),
            "request_timeout_s": log.request_timeout_s,
            "access": log.kafka,
            "keep_s": _retention_s(log, topic),
            "is_compacted": topic == log.control_topic,
        }

    def topics(self) -> dict[str, TopicFacts]:
        from omnidraft.bus import kafka_client

        log = self._settings
        return kafka_client.describe(self._servers, log.topics, log.kafka, log.request_timeout_s)

    def topic_names(self) -> set[str]:
        from omnidraft.bus import kafka_client

        log = self._settings
        return kafka_client.list_topics(self._servers, log.kafka, log.request_timeout_s).intersection(log.topics)


_LOGS: Mapping[str, type[_SqliteLog] | type[_KafkaLog]] = {"sqlite": _SqliteLog, "kafka": _KafkaLog}
"""How a log is opened, by the scheme of its url; config refuses all others."""


def _open(settings: Settings) -> _SqliteLog | _KafkaLog:
    """Return the log at this url, without encryption and signatures; nothing is created yet."""
    return _LOGS[urlsplit(settings.log.url).scheme](settings.log)


def _partitions(log: LogSettings, topic: str) -> int:
    return log.partitions if topic == log.traces_topic else 1


def _retention_s(log: LogSettings, topic: str) -> float | None:
    """Return the retention of this topic in seconds; None leaves it to the log."""
    hours = {
        log.traces_topic: log.retention_hours,
        log.dead_letters_topic: log.dead_letters_retention_hours,
    }.get(topic)
    return None if hours is None else hours * 3600


def log_writer(settings: Settings, topic: str) -> LogWriter:
    """Return a writer of this topic, which encrypts records if keys are set. Raises BusError when the log cannot be
    reached."""
    writer, keys = _open(settings).writer(topic), _keys(settings, topic)
    if not keys:
        return writer
    from omnidraft.bus.encryption import EncryptedWriter

    sealed = SEALED_HEADERS if topic == settings.log.dead_letters_topic else ()
    return EncryptedWriter(writer, keys, sealed_prefixes=sealed, tenant_keys=tenant_keys(settings))


def log_reader(settings: Settings, topic: str) -> LogReader:
    """Return a reader of this topic, decrypting if keys are set. Raises BusError when the log cannot be reached."""
    reader, keys = _open(settings).reader(topic), _keys(settings, topic)
    if not keys:
        return reader
    from omnidraft.bus.encryption import EncryptedReader

    return EncryptedReader(reader, keys, tenant_keys=tenant_keys(settings))


def tenant_keys(settings: Settings) -> "TenantKeys | None":
    """Return the data keys of tenants, of one thread; None without a key store. Nothing is opened yet."""
    if (store := key_store(settings)) is None:
        return None
    from omnidraft.bus.tenant_keys import TenantKeys

    return TenantKeys(store, [key.get_secret_value() for key in settings.log.encryption_keys])


def key_store(settings: Settings) -> "KeyStore | None":
    """Return the store of the tenants' keys; None without encryption or without a store. Nothing is opened yet."""
    url = settings.log.key_store_url
    if url is None:
        return None
    extras.require_driver(url, "log.key_store")
    from omnidraft.bus.key_store import KeyStore

    return KeyStore(url, settings.log.request_timeout_s)


def _keys(settings: Settings, topic: str) -> tuple[str, ...]:
    """Return the encryption keys of a topic. Control values contain no users' data and are not encrypted."""
    log = settings.log
    if topic not in (log.traces_topic, log.dead_letters_topic):
        return ()
    return tuple(key.get_secret_value() for key in log.encryption_keys)


def trace_source(
    settings: Settings,
    alignment: str | None,
    reader: LogReader,
    dead_letters: LogWriter,
    metrics: Metrics,
    is_forgotten: Callable[[TraceRecord], bool] = lambda record: False,
) -> TraceConsumer:
    """Return the consumer of this pair's records in the trace topic."""
    return TraceConsumer(
        reader,
        dead_letters,
        alignment,
        metrics,
        topic=settings.log.traces_topic,
        target=settings.models.target,
        drafter=settings.models.drafter,
        is_forgotten=is_forgotten,
    )


def topic_names(settings: Settings) -> set[str]:
    """Return those of the fleet's three topics that exist and may be used, without creating any. Raises BusError when
    the log is missing or cannot be reached."""
    return _open(settings).topic_names()


def topics(settings: Settings) -> dict[str, TopicFacts]:
    """Describe those of the fleet's three topics that exist, without creating any. Raises BusError when the log cannot
    be reached, or this login may not read the settings of topics."""
    return _open(settings).topics()


def existing_log_reader(settings: Settings, topic: str) -> LogReader:
    """Return a reader of this topic for a command that only reads: what is not there is refused, not created.

    Raises:
        RequestError: there is no such topic.
        BusError: the log cannot be reached.
    """
    if not settings.log.exists or topic not in topic_names(settings):
        raise RequestError(f"there is no topic {topic} at {settings.log.url} yet: a service makes it; {ELSEWHERE}")
    return log_reader(settings, topic)


def require_log(settings: Settings) -> None:
    """Raise RequestError where no service has begun a log, so that nobody would follow an order; BusError: it cannot be
    reached."""
    if not settings.log.exists or not topic_names(settings):
        raise RequestError(f"there is no log at {settings.log.url} yet: a service makes it; {ELSEWHERE}")


def record_cipher(settings: Settings) -> RecordCipher | None:
    """Return the cipher of records, tenants' factors and memories in snapshots, of one thread; None without
    encryption. Nothing is opened yet."""
    keys = [key.get_secret_value() for key in settings.log.encryption_keys]
    if not keys:
        return None
    from omnidraft.bus.tenant_keys import MasterKeys

    return tenant_keys(settings) or MasterKeys(keys)
