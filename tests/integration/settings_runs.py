"""What a worker, a learner and an operator do with the same settings."""

import json
from contextlib import closing
from typing import Any

from omnidraft import assembly, config
from omnidraft.config import RecorderSettings
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces.record import TraceRecord
from tests.trace_records import make_record


def environ(settings: config.Settings) -> dict[str, str]:
    """As an operator gives them."""
    log = settings.log
    given = {
        "OMNIDRAFT_LOG": log.url,
        "OMNIDRAFT_LOG__TOPIC_PREFIX": log.topic_prefix,
        "OMNIDRAFT_LOG__ENCRYPTION_KEYS": json.dumps([key.get_secret_value() for key in log.encryption_keys]),
        "OMNIDRAFT_REGISTRY__URL": settings.registry.url,
        "COLUMNS": "250",
    }
    if log.key_store is not None:
        given["OMNIDRAFT_LOG__KEY_STORE"] = log.key_store.get_secret_value()
    return given


def record(settings: config.Settings, *names: str, **fields: Any) -> None:
    """As a worker does; a name may be tenant/request."""
    tenants = [{"tenant": name.partition("/")[0]} if "/" in name else {} for name in names]
    emit(settings, *(make_record(name, **tenant, **fields) for name, tenant in zip(names, tenants, strict=True)))


def emit(settings: config.Settings, *records: TraceRecord) -> None:
    """As a worker does."""
    topic = settings.log.traces_topic
    producer = TraceProducer(lambda: assembly.log_writer(settings, topic), RecorderSettings(), CountingMetrics())
    for each in records:
        producer.emit(each)
    assert producer.close(20.0) == 0


def learn(settings: config.Settings) -> tuple[list[str], list[str]]:
    """Names of the records that a learner gets, and reasons of what it does not."""
    log = settings.log
    with (
        closing(assembly.log_reader(settings, log.traces_topic)) as reader,
        closing(assembly.log_writer(settings, log.dead_letters_topic)) as letters,
    ):
        consumer = TraceConsumer(reader, letters, None, CountingMetrics(), topic=log.traces_topic)
        consumer.seek({})
        polls = list(topic_scan.polls_until(lambda: consumer.poll(100, 1.0), reader.end_offsets()))
    records = [each.request_id for polled in polls for _, _, each in polled.records]
    return records, [reason for polled in polls for _, _, reason, _ in polled.skipped]
