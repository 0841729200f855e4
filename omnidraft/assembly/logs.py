"""Logs and registries from their URLs, with their credentials, keys and retention."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from omnidraft import extras
from omnidraft.assembly import signing
from omnidraft.bus import sqlite_topic
from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.config import Settings, masked
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.errors import ConfigError
from omnidraft.ports import LogReader, LogWriter, Metrics, Registry, SnapshotReader, TopicFacts
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.registry.mlflow_registry import MlflowRegistry
from omnidraft.registry.mlflow_runs import Experiment
from omnidraft.registry.mlflow_store import check_reachable
from omnidraft.registry.readers import DeferredRegistry, EmptyRegistry
from omnidraft.traces.record import TraceRecord

if TYPE_CHECKING:
    from omnidraft.bus.key_store import KeyStore
    from omnidraft.bus.tenant_keys import TenantKeys


logger = logging.getLogger(__name__)

SEALED_HEADERS = ("error", "original.")
"""Prefixes of dead-letter headers that may quote users' text."""


def log_writer(settings: Settings, topic: str) -> LogWriter:
    """Return a writer of this topic, which encrypts records and signs announcements if keys are set. Raises BusError
    when the log cannot be reached."""
    if topic == settings.log.control_topic:
        return signing.signing_writer(settings, _plain_writer(settings, topic), partial(control_reader, settings))
    writer, keys = _plain_writer(settings, topic), _keys(settings, topic)
    if not keys:
        return writer
    from omnidraft.bus.encryption import EncryptedWriter

    sealed = SEALED_HEADERS if topic == settings.log.dead_letters_topic else ()
    return EncryptedWriter(writer, keys, sealed_prefixes=sealed, tenant_keys=tenant_keys(settings))


def log_reader(settings: Settings, topic: str) -> LogReader:
    """Return a reader of this topic, decrypting if keys are set. Raises BusError when the log cannot be reached."""
    reader, keys = _plain_reader(settings, topic), _keys(settings, topic)
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


def control_writer(settings: Settings) -> LogWriter:
    """Return a writer of the control topic. Raises BusError when the log cannot be reached."""
    return log_writer(settings, settings.log.control_topic)


def control_reader(settings: Settings) -> LogReader:
    """Return a reader of the control topic. Raises BusError when the log cannot be reached."""
    return log_reader(settings, settings.log.control_topic)


def _keys(settings: Settings, topic: str) -> tuple[str, ...]:
    """Return the encryption keys of a topic. Announcements contain no users' data and are not encrypted."""
    log = settings.log
    if topic not in (log.traces_topic, log.dead_letters_topic):
        return ()
    return tuple(key.get_secret_value() for key in log.encryption_keys)


def _retention_s(settings: Settings, topic: str) -> float | None:
    """Return the retention of this topic in seconds; None leaves it to the log."""
    log = settings.log
    hours = {
        log.traces_topic: log.retention_hours,
        log.dead_letters_topic: log.dead_letters_retention_hours,
        log.control_topic: math.inf,
    }.get(topic)
    return None if hours is None else hours * 3600


def _plain_writer(settings: Settings, topic: str) -> LogWriter:
    log, where = settings.log, urlsplit(settings.log.url)
    partitions = log.partitions if topic == log.traces_topic else 1
    match where.scheme:
        case "sqlite":
            keep_s, timeout_s = _retention_s(settings, topic), log.request_timeout_s
            return SqliteWriter(_path(log.url), topic, partitions=partitions, timeout_s=timeout_s, keep_s=keep_s)
        case "kafka":
            extras.require("kafka", f"log.url = {log.url!r}")
            from omnidraft.bus.kafka_log import KafkaWriter

            return KafkaWriter(
                where.netloc,
                topic,
                partitions=partitions,
                request_timeout_s=log.request_timeout_s,
                access=log.kafka,
                keep_s=_retention_s(settings, topic),
            )
    raise ConfigError(f"log.url must be sqlite:///path or kafka://host:port, got {log.url!r}")


def _plain_reader(settings: Settings, topic: str) -> LogReader:
    log, where = settings.log, urlsplit(settings.log.url)
    partitions = log.partitions if topic == log.traces_topic else 1
    match where.scheme:
        case "sqlite":
            return SqliteReader(_path(log.url), topic, partitions=partitions, timeout_s=log.request_timeout_s)
        case "kafka":
            extras.require("kafka", f"log.url = {log.url!r}")
            from omnidraft.bus.kafka_log import KafkaReader

            return KafkaReader(
                where.netloc,
                topic,
                partitions=partitions,
                request_timeout_s=log.request_timeout_s,
                access=log.kafka,
                keep_s=_retention_s(settings, topic),
            )
    raise ConfigError(f"log.url must be sqlite:///path or kafka://host:port, got {log.url!r}")


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
    the log cannot be reached."""
    where = urlsplit(settings.log.url)
    if where.scheme != "kafka":
        return set(topics(settings))
    extras.require("kafka", f"log.url = {settings.log.url!r}")
    from omnidraft.bus import kafka_client

    existing = kafka_client.list_topics(where.netloc, settings.log.kafka, settings.log.request_timeout_s)
    return existing.intersection(settings.log.topics)


def topics(settings: Settings) -> dict[str, TopicFacts]:
    """Describe those of the fleet's three topics that exist, without creating any. Raises BusError when the log cannot
    be reached, or this login may not read the settings of topics."""
    log, where = settings.log, urlsplit(settings.log.url)
    match where.scheme:
        case "sqlite":
            existing = sqlite_topic.describe(_path(log.url), log.request_timeout_s)
            return {name: _with_retention(existing[name], settings, name) for name in log.topics if name in existing}
        case "kafka":
            extras.require("kafka", f"log.url = {log.url!r}")
            from omnidraft.bus import kafka_client

            return kafka_client.describe(where.netloc, log.topics, log.kafka, log.request_timeout_s)
    raise ConfigError(f"log.url must be sqlite:///path or kafka://host:port, got {log.url!r}")


def _with_retention(facts: TopicFacts, settings: Settings, topic: str) -> TopicFacts:
    """Add the retention of an SQLite log, which its writers' settings determine; they are assumed to be these."""
    keep_s = _retention_s(settings, topic)
    return facts if keep_s in (None, math.inf) else replace(facts, retention_ms=int(keep_s * 1000))


def has_registry(settings: Settings) -> bool:
    """Return whether the registry exists, as far as its address tells: a local store does once a service started."""
    url = settings.registry.url
    return not url.startswith(("sqlite:", "directory:")) or _path(url).exists()


def registry(settings: Settings) -> Registry:
    """Return the registry of `models.target` and its drafter, whose promotions are signed if keys are set.

    Raises:
        RegistryError: it cannot be reached.
        StorageError: `registry.accepted_file` cannot be used.
    """
    return signing.attested(settings, _plain_registry(settings), partial(control_reader, settings))


def _plain_registry(settings: Settings) -> Registry:
    section, pair = settings.registry, (settings.models.followed_drafter, settings.models.target)
    options: dict[str, Any] = {
        "keep_resume": section.keep_resume,
        "keep_serving": section.keep_serving,
        "signing": signing.snapshot_signing(settings),
    }
    if section.url.startswith("directory://"):
        return DirectoryRegistry(_path(section.url), *pair, **options)
    _require_mlflow(settings)

    return MlflowRegistry(section.url, *pair, artifacts=section.artifacts, **options)


def snapshot_reader(settings: Settings) -> SnapshotReader:
    """Return what a worker reads snapshots from, opened by the thread that reads first.

    A worker beside which nobody can have learned, without MLflow and its store, reads from an empty registry.

    Raises:
        ExtraMissing: there is a store of MLflow's, and MLflow is not installed.
        RegistryError: nothing answers at its address.
    """
    if settings.registry.url.startswith("directory://"):
        return _plain_registry(settings)
    if not extras.is_installed("mlflow") and not has_registry(settings):
        logger.info("without MLflow no learned drafter is looked for (pip install 'omnidraft[mlflow]')")
        return EmptyRegistry()
    _require_mlflow(settings)

    check_reachable(settings.registry.url)
    return DeferredRegistry(partial(_plain_registry, settings))


def experiment(settings: Settings, name: str) -> Experiment | None:
    """Return the MLflow experiment for runs that are not versions; None without MLflow. Raises RegistryError."""
    if settings.registry.url.startswith("directory://"):
        return None
    _require_mlflow(settings)

    return Experiment(settings.registry.url, name, artifacts=settings.registry.artifacts)


def _require_mlflow(settings: Settings) -> None:
    extras.require("mlflow", f"registry.url = {masked(settings.registry.url)!r} (directory:///path does without)")
    extras.require_driver(settings.registry.url, "registry.url")


def log_path(settings: Settings) -> Path | None:
    """Return the file of an SQLite log, None for any other."""
    return _path(settings.log.url) if settings.log.url.startswith("sqlite:") else None


def _path(url: str) -> Path:
    """Return the path in sqlite:///relative/path or sqlite:////absolute/path, the syntax of SQLAlchemy and MLflow."""
    return Path(url.split(":///", 1)[1])
