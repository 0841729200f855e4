"""A redactor may change or drop a record; none of its failures reaches serving or shows the content of a record."""

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest

from omnidraft.config import RecorderSettings
from omnidraft.decode.recording.redactor import Redactor
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from tests.trace_records import make_record

SECRET = "4711-token"
DROPPED = "omnidraft_traces_dropped_total"


def recorded(redactor: Redactor | None, *names: str) -> tuple[list[TraceRecord], CountingMetrics]:
    log, metrics = MemoryLog(), CountingMetrics()
    recorder = TraceProducer(lambda: MemoryWriter(log, "t"), RecorderSettings(), metrics, redactor)
    for name in names:
        recorder.emit(make_record(name))
    assert recorder.close(5.0) == 0
    reader, written = MemoryReader(log, "t"), []
    while messages := reader.poll(100, timeout_s=0).messages:
        written += [codec.decode(message.value, message.headers) for message in messages]
    return written, metrics


def test_what_the_redactor_returns_is_what_is_written():
    written, metrics = recorded(
        lambda record: replace(record, tenant="x", prompt_ids=np.array([], np.uint32)), "a", "b"
    )
    assert [(record.request_id, record.tenant, len(record.prompt_ids)) for record in written] == [
        ("a", "x", 0),
        ("b", "x", 0),
    ]
    assert metrics.value("omnidraft_traces_acknowledged_total") == 2


def test_none_is_not_recorded_and_counted():
    written, metrics = recorded(lambda record: None if record.request_id == "a" else record, "a", "b", "a")
    assert [record.request_id for record in written] == ["b"]
    assert metrics.value(DROPPED, reason="redacted") == 2
    assert metrics.value("omnidraft_traces_emitted_total") == 3


def raises(record: TraceRecord) -> TraceRecord:
    if record.request_id == "a":
        raise ValueError(SECRET)
    return record


def forgets_to_return(record: TraceRecord) -> TraceRecord:
    return record if record.request_id == "b" else SECRET  # type: ignore[return-value]


@pytest.mark.parametrize(("redactor", "said"), [(raises, "ValueError"), (forgets_to_return, "it returned str")])
def test_a_redactor_that_fails_loses_that_record_only_and_says_no_more_than_how(redactor, said, caplog):
    with caplog.at_level(logging.DEBUG):
        written, metrics = recorded(redactor, "a", "b", "a", "b")
    assert [record.request_id for record in written] == ["b", "b"]
    assert metrics.value(DROPPED, reason="redactor_failed") == 2
    assert caplog.text.count(said) == 1
    assert SECRET not in caplog.text


def test_a_redacted_record_that_nobody_could_read_is_dropped_as_any_other():
    written, metrics = recorded(lambda record: replace(record, emitted_ids=np.array([], np.uint32)), "a")
    assert written == []
    assert metrics.value(DROPPED, reason="invalid") == 1


def test_decoding_does_not_wait_for_the_redactor():
    called, may_go_on, threads = threading.Event(), threading.Event(), []

    def slow(record: TraceRecord) -> TraceRecord:
        threads.append(threading.current_thread())
        called.set()
        may_go_on.wait(5.0)
        return record

    log, metrics = MemoryLog(), CountingMetrics()
    recorder = TraceProducer(lambda: MemoryWriter(log, "t"), RecorderSettings(queue_records=2), metrics, slow)
    recorder.emit(make_record())
    assert called.wait(5.0)
    for _ in range(10):
        recorder.emit(make_record())
    assert metrics.value(DROPPED, reason="queue_full") == 8
    may_go_on.set()
    recorder.close(5.0)
    assert threading.current_thread() not in threads
