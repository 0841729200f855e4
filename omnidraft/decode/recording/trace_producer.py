"""Produces trace records to the log from a thread of its own, so that decoding never waits for it.

While the log is down, records wait and the thread retries; when the queue is full, records are dropped and counted. A
retried batch may be in the log twice: (request_id, segment) identifies a record, and readers keep the first. The
operator's redactor changes or drops a record before it is written.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from threading import Event, Lock

from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type, wait_exponential_jitter

from omnidraft.config import RecorderSettings
from omnidraft.errors import BusError, MessageTooLarge, RecordTooLarge, WireError
from omnidraft.ports import DropReason, LogWriter, Metrics, NoopSpan, NoopTracing, Outgoing, Span, Tracing
from omnidraft.threads import SupervisedThread
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord

logger = logging.getLogger(__name__)

BATCH_RECORDS = 128
IDLE_S = 0.1
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
DRAIN_S = 10.0
"""The time a stopping process waits for the log to acknowledge queued records."""
DRAIN_WAIT_S = 0.1
"""Seconds between attempts while closing with a deadline."""

EMITTED = "omnidraft_traces_emitted_total"
DROPPED = "omnidraft_traces_dropped_total"
ACKNOWLEDGED = "omnidraft_traces_acknowledged_total"

Redactor = Callable[[TraceRecord], TraceRecord | None]
"""The operator's function: returns the record to log; None where nobody may see it."""


class TraceProducer:
    """Any thread may emit. Every emitted record ends as acknowledged or as dropped, in the counters too."""

    def __init__(
        self,
        writer_factory: Callable[[], LogWriter],
        settings: RecorderSettings,
        metrics: Metrics,
        redactor: Redactor | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Start the thread. It makes the writer, with retries, uses and closes it, and calls the redactor for every
        record. A record's span begins with the record and ends when the log has acknowledged it; the record's
        traceparent names it."""
        self._writer_factory, self._metrics = writer_factory, metrics
        self._redact = _SafeRedactor(redactor) if redactor else None
        self._tracing = tracing or NoopTracing()
        self._queue: queue.Queue[_QueuedRecord] = queue.Queue(settings.queue_records)
        self._writer: LogWriter | None = None
        self._lock = Lock()  # over _num_waiting and _is_closed
        self._num_waiting = 0
        self._num_appended = BATCH_RECORDS
        """Records of the next append."""
        self._is_closed = False
        self._closing = Event()
        self._deadline_s = float("inf")
        self._thread = SupervisedThread(self._run, name="trace-recorder", is_over=self._closing.is_set)
        self._thread.start()

    def emit(self, record: TraceRecord) -> None:
        """Queue a record; returns at once, whatever the log does."""
        self._metrics.add(EMITTED)
        with self._lock:
            is_late = self._is_closed or self._closing.is_set()
            self._num_waiting += not is_late
        if is_late:
            self._metrics.add(DROPPED, reason="closed")
            return
        queued = self._begin_span(record)
        try:
            self._queue.put_nowait(queued)
        except queue.Full:
            self._drop(queued.span, reason="queue_full")

    @property
    def problem(self) -> str | None:
        """The reason why records do not reach the log any more; None while they do, or wait for it."""
        return self._thread.problem

    @property
    def num_waiting(self) -> int:
        """The number of records that the log has not acknowledged yet."""
        return self._num_waiting

    def close(self, timeout_s: float = DRAIN_S) -> int:
        """Wait until the log has acknowledged all records, at most `timeout_s`; return the number dropped for lack of
        time.

        A second call changes nothing and returns 0.
        """
        self._deadline_s = min(self._deadline_s, time.monotonic() + timeout_s)
        self._closing.set()
        self._thread.join(timeout_s)
        with self._lock:
            num_dropped, self._num_waiting, self._is_closed = self._num_waiting, 0, True
        if num_dropped:
            self._metrics.add(DROPPED, num_dropped, reason="closed")
            logger.warning("the log did not acknowledge %d trace records within %.1f s", num_dropped, timeout_s)
        return num_dropped

    def _run(self) -> None:
        while batch := self._next_batch():
            unwritten = deque((message, each.span) for each in batch if (message := self._encode(each)) is not None)
            try:
                self._retrying()(self._append_all, unwritten)
            except RetryError:
                break  # past the deadline; close() counts the rest
        self._close_writer()

    def _append_all(self, unwritten: "deque[tuple[Outgoing, Span]]") -> None:
        """Append records, slice by slice; those that the log acknowledged leave the queue. A log that is slow after an
        outage takes a few in its time where it would not take all. The records of a slice with one that is too large
        for it are appended one by one, since it may have the others already, and that one is dropped. Raises
        BusError."""
        num_alone = 0
        while unwritten:
            part = list(islice(unwritten, 1 if num_alone else self._num_appended))
            num_alone = max(0, num_alone - 1)
            self._num_appended = max(1, self._num_appended // 2)  # unless the log takes them
            try:
                self._append([message for message, _ in part])
            except MessageTooLarge as exc:
                if len(part) == 1:
                    logger.warning("dropped a trace record: %s", exc)
                    self._drop(unwritten.popleft()[1], reason="too_large")
                else:
                    num_alone = len(part)
                continue
            self._num_appended = min(4 * self._num_appended, BATCH_RECORDS)
            self._settle(len(part), ACKNOWLEDGED)
            for message, span in part:
                unwritten.popleft()
                span.end(size_bytes=len(message.value))

    def _begin_span(self, record: TraceRecord) -> "_QueuedRecord":
        if not self._tracing.is_on:
            return _QueuedRecord(record, NoopSpan(None))
        span = self._tracing.begin(
            "trace record",
            parent=record.traceparent,
            request_id=record.request_id,
            segment=record.segment,
            tokens=len(record.emitted_ids),
        )
        return _QueuedRecord(replace(record, traceparent=span.context), span)

    def _next_batch(self) -> list["_QueuedRecord"]:
        """Return up to BATCH_RECORDS queued records; none when closing and the queue is empty, or the deadline has
        passed."""
        batch: list[_QueuedRecord] = []
        while not batch and time.monotonic() < self._deadline_s:
            is_last = self._closing.is_set()  # read before the queue: earlier records are seen below
            try:
                batch.append(self._queue.get(timeout=IDLE_S))
                while len(batch) < BATCH_RECORDS:
                    batch.append(self._queue.get_nowait())
            except queue.Empty:
                if is_last:
                    break
        return batch

    def _encode(self, queued: "_QueuedRecord") -> Outgoing | None:
        record = self._redact(queued.record) if self._redact else queued.record
        if isinstance(record, str):
            self._drop(queued.span, reason=record)
            return None
        try:
            value = codec.encode(record)
        except RecordTooLarge as exc:
            logger.warning("dropped a trace record: %s", exc)
            self._drop(queued.span, reason="too_large")
            return None
        except WireError as exc:
            logger.warning("dropped a trace record that is not readable: %s", exc)
            self._drop(queued.span, reason="invalid")
            return None
        return Outgoing(codec.key(record), value, codec.headers(record), tenant=record.tenant)

    def _drop(self, span: Span, *, reason: DropReason) -> None:
        self._settle(1, DROPPED, reason=reason)
        span.end(error=reason)

    def _append(self, messages: list[Outgoing]) -> None:
        if self._writer is None:
            self._writer = self._writer_factory()
        self._writer.append(messages)

    def _retrying(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(BusError),
            wait=wait_exponential_jitter(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S, jitter=FIRST_WAIT_S),
            stop=lambda state: time.monotonic() >= self._deadline_s,
            sleep=self._sleep,
            before_sleep=_log_failure,
        )

    def _sleep(self, seconds: float) -> None:
        """Sleep; close(), which has a deadline, cuts it short."""
        if self._closing.wait(seconds):
            time.sleep(min(seconds, DRAIN_WAIT_S))

    def _settle(self, num_records: int, counter: str, **labels: str) -> None:
        """Count records as acknowledged or dropped, unless close() has counted them already."""
        with self._lock:
            if self._is_closed:
                return
            self._num_waiting -= num_records
        self._metrics.add(counter, num_records, **labels)

    def _close_writer(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except BusError as exc:
            logger.warning("closing the log: %s", exc)


@dataclass(frozen=True, slots=True)
class _QueuedRecord:
    """A record on its way to the log."""

    record: TraceRecord
    span: Span


def _log_failure(state: RetryCallState) -> None:
    """Log the first failure of an outage, then one about every minute."""
    if state.attempt_number == 1 or state.attempt_number % 12 == 0:
        cause = state.outcome.exception() if state.outcome else None
        logger.warning("trace records wait for the log, attempt %d: %s", state.attempt_number, cause)


class _SafeRedactor:
    """Runs the operator's redactor and never raises: it returns the reason why a record is dropped instead. One thread
    at a time."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._logged_failures: set[str] = set()

    def __call__(self, record: TraceRecord) -> TraceRecord | DropReason:
        """Return the record to write, or the reason why it is dropped."""
        try:
            redacted = self._redactor(record)
        except Exception as exc:  # not our code: it may raise anything
            return self._failed(type(exc).__name__)
        if redacted is None:
            return "redacted"
        return redacted if isinstance(redacted, TraceRecord) else self._failed(f"it returned {type(redacted).__name__}")

    def _failed(self, failure: str) -> DropReason:
        """Log one line for each kind of failure, without its message, which may contain the record's text."""
        if failure not in self._logged_failures:
            self._logged_failures.add(failure)
            logger.warning("recorder.redactor failed, the record is dropped: %s", failure)
        return "redactor_failed"
