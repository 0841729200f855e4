"""Decoding never waits for the producer, and every record is acknowledged or counted as dropped.

A redactor may change or drop a record; none of its failures reaches serving or shows the content of a record.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event

import numpy as np
import pytest

from omnidraft.config import RecorderSettings
from omnidraft.decode.recording.trace_producer import Redactor, TraceProducer
from omnidraft.errors import BusError, MessageTooLarge
from omnidraft.ports import Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from tests.trace_records import make_record

PATIENCE_S = 5.0
SECRET = "4711-token"
DROPPED = "omnidraft_traces_dropped_total"


class HangingWriter:
    """Blocks until it is released."""

    def __init__(self) -> None:
        self.called, self.may_go_on = Event(), Event()

    def append(self, messages: Sequence[Outgoing]) -> None:
        self.called.set()
        self.may_go_on.wait(PATIENCE_S)

    def close(self) -> None: ...


class FlakyWriter(MemoryWriter):
    """Refuses the first `refusals` appends; with `keeps` a refused one is in the log all the same."""

    def __init__(self, log: MemoryLog, refusals: float, keeps: bool = False) -> None:
        super().__init__(log, "t")
        self.refusals, self.keeps, self.attempts, self.is_closed = refusals, keeps, 0, False

    def append(self, messages: Sequence[Outgoing]) -> None:
        self.attempts += 1
        if self.attempts > self.refusals:
            super().append(messages)
            return
        if self.keeps:
            super().append(messages)
        raise BusError("the log is down")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def metrics() -> CountingMetrics:
    return CountingMetrics()


def counts(metrics: CountingMetrics) -> tuple[float, float, float]:
    names = ("emitted", "acknowledged", "dropped")
    return tuple(metrics.value(f"omnidraft_traces_{name}_total") for name in names)


def ids_in(log: MemoryLog) -> list[str]:
    return [message.key.decode() for kept in log.topic("t") for message in kept]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def test_what_is_emitted_arrives_in_order_and_is_acknowledged(metrics):
    log = MemoryLog()
    recorder = TraceProducer(lambda: MemoryWriter(log, "t"), RecorderSettings(), metrics)
    for number in range(50):
        recorder.emit(make_record(f"request-{number}"))
    assert recorder.close(PATIENCE_S) == 0
    assert ids_in(log) == [f"request-{number}" for number in range(50)]
    assert counts(metrics) == (50, 50, 0)
    message = MemoryReader(log, "t").poll(1, timeout_s=0).messages[0]
    assert codec.decode(message.value, message.headers).request_id == "request-0"


def test_a_log_that_hangs_never_holds_up_decoding_and_overflow_is_counted(metrics):
    writer = HangingWriter()
    recorder = TraceProducer(lambda: writer, RecorderSettings(queue_records=4), metrics)
    recorder.emit(make_record())
    assert writer.called.wait(PATIENCE_S)
    started_s = time.monotonic()
    for _ in range(10):
        recorder.emit(make_record())
    assert time.monotonic() - started_s < PATIENCE_S / 2
    assert metrics.value(DROPPED, reason="queue_full") == 6
    writer.may_go_on.set()
    assert recorder.close(PATIENCE_S) == 0
    assert counts(metrics) == (11, 5, 6)


def test_closing_on_a_log_that_hangs_ends_in_time_and_says_what_was_lost(metrics):
    writer = HangingWriter()
    recorder = TraceProducer(lambda: writer, RecorderSettings(), metrics)
    for _ in range(3):
        recorder.emit(make_record())
    started_s = time.monotonic()
    assert recorder.close(0.2) == 3
    assert time.monotonic() - started_s < PATIENCE_S / 2
    writer.may_go_on.set()  # an acknowledgement that comes too late is not counted twice
    time.sleep(0.05)
    assert counts(metrics) == (3, 0, 3)


def test_records_wait_while_the_log_is_down_and_arrive_when_it_is_back(metrics):
    log = MemoryLog()
    writer = FlakyWriter(log, refusals=2)
    recorder = TraceProducer(lambda: writer, RecorderSettings(), metrics)
    recorder.emit(make_record("a"))
    wait_for(lambda: writer.attempts > 2)
    assert recorder.close(PATIENCE_S) == 0
    assert ids_in(log) == ["a"]
    assert counts(metrics) == (1, 1, 0)
    assert writer.is_closed


def test_a_log_that_cannot_be_opened_at_first_is_tried_again(metrics):
    log, attempts = MemoryLog(), []

    def open_writer() -> MemoryWriter:
        attempts.append(1)
        if len(attempts) < 3:
            raise BusError("no broker")
        return MemoryWriter(log, "t")

    recorder = TraceProducer(open_writer, RecorderSettings(), metrics)
    recorder.emit(make_record("a"))
    assert recorder.close(PATIENCE_S) == 0
    assert ids_in(log) == ["a"]


def test_closing_while_the_log_is_down_gives_up_at_the_deadline(metrics):
    recorder = TraceProducer(lambda: FlakyWriter(MemoryLog(), refusals=float("inf")), RecorderSettings(), metrics)
    recorder.emit(make_record())
    started_s = time.monotonic()
    assert recorder.close(0.3) == 1
    assert time.monotonic() - started_s < PATIENCE_S / 2
    assert metrics.value(DROPPED, reason="closed") == 1


def test_an_append_that_failed_after_it_was_kept_is_a_duplicate_that_can_be_told(metrics):
    log = MemoryLog()
    writer = FlakyWriter(log, refusals=1, keeps=True)
    recorder = TraceProducer(lambda: writer, RecorderSettings(), metrics)
    recorder.emit(make_record("a", segment=3))
    assert recorder.close(PATIENCE_S) == 0
    messages = log.topic("t")[0]
    names = {(r.request_id, r.segment) for r in (codec.decode(m.value, m.headers) for m in messages)}
    assert len(messages) == 2
    assert names == {("a", 3)}


BROKEN = {
    "a mode that is none": ({"mode": "slow"}, "invalid"),
    "an id that is no text": ({"request_id": "\ud800"}, "invalid"),
    "no prompt": ({"prompt_ids": None}, "invalid"),
    "a tenant that no key store holds": ({"tenant": "\x00"}, "invalid"),
    "a tenant too long for one": ({"tenant": "t" * 1025}, "invalid"),
    "more than a log takes": ({"prompt_ids": np.arange(260_000, dtype=np.uint32)}, "too_large"),
}


@pytest.mark.parametrize(("fields", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_record_that_nobody_could_keep_or_read_is_dropped_and_holds_up_no_other(metrics, fields, reason):
    log = MemoryLog()
    recorder = TraceProducer(lambda: MemoryWriter(log, "t"), RecorderSettings(), metrics)
    recorder.emit(make_record(**fields))
    recorder.emit(make_record("b", tenant="t" * 1024, emitted_ids=np.arange(6, dtype=np.uint32)))
    assert recorder.close(PATIENCE_S) == 0
    assert ids_in(log) == ["b"]
    assert counts(metrics) == (2, 1, 1)
    assert metrics.value(DROPPED, reason=reason) == 1


def test_what_is_emitted_after_closing_is_counted_as_dropped(metrics):
    recorder = TraceProducer(lambda: MemoryWriter(MemoryLog(), "t"), RecorderSettings(), metrics)
    assert recorder.close(PATIENCE_S) == 0
    recorder.emit(make_record())
    assert counts(metrics) == (1, 0, 1)
    assert recorder.close(PATIENCE_S) == 0


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


def test_what_the_redactor_returns_is_what_is_written_and_none_is_not_recorded():
    def redact(record: TraceRecord) -> TraceRecord | None:
        return None if record.request_id == "a" else replace(record, tenant="x", prompt_ids=np.array([], np.uint32))

    written, metrics = recorded(redact, "a", "b", "a")
    assert [(record.request_id, record.tenant, len(record.prompt_ids)) for record in written] == [("b", "x", 0)]
    assert metrics.value(DROPPED, reason="redacted") == 2
    assert counts(metrics) == (3, 1, 2)


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


class SlowWriter(MemoryWriter):
    """After an outage it takes sixteen records in its time, and loses those behind them."""

    def append(self, messages: Sequence[Outgoing]) -> None:
        super().append(messages[:16])
        if len(messages) > 16:
            raise BusError("the deadline of the append has passed")


def test_a_log_that_takes_a_few_records_at_a_time_gets_all_of_them(metrics: CountingMetrics) -> None:
    log, gate = MemoryLog(), Event()

    def connect() -> SlowWriter:
        gate.wait(PATIENCE_S)
        return SlowWriter(log, "t")

    producer = TraceProducer(connect, RecorderSettings(), metrics)
    names = [f"r{number:03d}" for number in range(100)]
    for name in names:
        producer.emit(make_record(name))
    gate.set()
    assert producer.close(PATIENCE_S * 4) == 0
    assert set(ids_in(log)) == set(names)
    assert len(ids_in(log)) < 3 * len(names)
    assert counts(metrics) == (100, 100, 0)


class NarrowWriter(MemoryWriter):
    """Its topic does not take the long records; of an append with one it keeps the others, as Kafka may."""

    def append(self, messages: Sequence[Outgoing]) -> None:
        kept = [message for message in messages if not message.key.startswith(b"long")]
        super().append(kept)
        if len(kept) < len(messages):
            raise MessageTooLarge("the topic takes 20,000 bytes")


def test_a_record_that_the_topic_never_takes_is_dropped_and_holds_up_no_other(
    metrics: CountingMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    log, gate = MemoryLog(), Event()

    def connect() -> NarrowWriter:
        gate.wait(PATIENCE_S)
        return NarrowWriter(log, "t")

    producer = TraceProducer(connect, RecorderSettings(), metrics)
    names = [f"long{number}" if number in (0, 60, 199) else f"r{number:03d}" for number in range(200)]
    for name in names:
        producer.emit(make_record(name))
    gate.set()
    assert producer.close(PATIENCE_S) == 0
    num_copies = Counter(ids_in(log))
    assert sorted(num_copies) == [name for name in names if name.startswith("r")]
    assert max(num_copies.values()) == 2
    assert counts(metrics) == (200, 197, 3)
    assert metrics.value(DROPPED, reason="too_large") == 3
    assert caplog.text.count("dropped a trace record: the topic takes 20,000 bytes") == 3
