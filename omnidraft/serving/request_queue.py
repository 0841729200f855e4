"""A bounded fair queue of requests for each engine, and the one thread that decodes them, pass by pass in turn."""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

from omnidraft.decode.engine import Engine
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import OmnidraftError
from omnidraft.ports import Metrics
from omnidraft.serving.fair_queue import FairQueue
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.supervised_thread import SupervisedThread

logger = logging.getLogger(__name__)

RECENT_REQUESTS = 32
"""Finished requests whose durations predict those of the next ones."""
MAX_RETRY_S = 60
"""OpenAI's clients ignore a larger Retry-After."""
LAST_STEP_S = 2.0
"""The time that `close` waits for the current pass after the deadline."""


class QueueFull(OmnidraftError):
    """Too many requests wait; try again after `retry_after_s` (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(OmnidraftError):
    """The worker is about to end; ask another one (HTTP 503)."""


class Abandoned(OmnidraftError):
    """The client went away; nobody reads the response."""


@dataclass(slots=True)
class _EngineQueue:
    """The waiting requests of one engine, and the durations of its last ones."""

    waiting: FairQueue = field(default_factory=FairQueue)
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    """Each from the start of decoding to its end."""
    serving: QueuedRequest | None = None
    started_s: float = 0.0
    """Start of `serving`, by the monotonic clock."""
    used_s: float = 0.0
    """Time that decoding `serving` has taken since, without the passes of other engines."""

    def retry_after_s(self) -> int:
        """Return the whole seconds until half of the waiting requests will have been served."""
        so_far_s = time.monotonic() - self.started_s if self.serving else 0.0
        mean_s = fmean(self.durations_s) if self.durations_s else so_far_s
        return max(1, min(MAX_RETRY_S, ceil(mean_s * (len(self.waiting) + 1) / 2)))


class RequestQueue:
    """A bounded queue for each engine, all in front of one decoding thread.

    Each engine decodes one text at a time, and the engines take turns, a target pass each. So two targets never compute
    at once, and no request waits for a long text of another target, nor for its queue.
    """

    def __init__(self, metrics: Metrics, *, max_waiting: int) -> None:
        """`max_waiting` requests may wait for each engine, besides the one that it decodes."""
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._queues: defaultdict[Engine, _EngineQueue] = defaultdict(_EngineQueue)
        self._is_closed = False
        self._is_past_deadline = False
        self._changed = threading.Condition()  # over all of the above
        self._thread = SupervisedThread(self._run, name="decoding", is_over=lambda: self._is_closed)
        self._thread.start()

    def submit(self, request: QueuedRequest) -> QueuedRequest:
        """Add a request to the queue of its engine and return it. Raises QueueFull, Stopping."""
        with self._changed:
            queue = self._queues[request.engine]
            try:
                self._admit(queue, request)
            except (QueueFull, Stopping) as exc:
                self._count(request, exc)
                raise
            queue.waiting.add(request)
            self._set_waiting_gauge(request.engine)
            self._changed.notify()
        return request

    def abandon(self, request: QueuedRequest) -> None:
        """End a request whose client went away: at once if it waits, else at its next step."""
        request.is_abandoned = True
        with self._changed:
            was_waiting = self._queues[request.engine].waiting.remove(request)
            self._set_waiting_gauge(request.engine)
        if was_waiting:
            self._end(request, Abandoned("the client went away before its turn"))

    @property
    def is_alive(self) -> bool:
        """Whether the decoding thread still runs; a dead one is for the operator to restart."""
        return self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """The reason why nothing is decoded; None while the thread runs."""
        return None if self.is_alive else self._thread.problem or "the decoding thread ended"

    @property
    def is_open(self) -> bool:
        """Whether new requests are taken."""
        return self.is_alive and not self._is_closed

    def stop_accepting(self) -> None:
        """Refuse new requests; accepted ones go on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Refuse new requests, finish accepted ones within `timeout_s`, and end the rest with Stopping."""
        self.stop_accepting()
        self._thread.join(timeout_s)
        with self._changed:
            self._is_past_deadline = True
            late = [request for queue in self._queues.values() for request in queue.waiting.clear()]
        for request in late:
            self._end(request, Stopping("the worker stopped before this request's turn; ask another one"))
        self._thread.join(LAST_STEP_S)

    def _admit(self, queue: _EngineQueue, request: QueuedRequest) -> None:
        """Raises QueueFull, Stopping. A full queue may evict the newest request of another client instead."""
        if not self.is_open:
            raise Stopping("the worker is stopping; ask another one")
        if len(queue.waiting) < self._max_waiting:
            return
        full = QueueFull(f"{self._max_waiting} requests are waiting already; try again later", queue.retry_after_s())
        evicted = queue.waiting.evict_for(request.client)
        if evicted is None:
            raise full
        self._end(evicted, full)

    def _run(self) -> None:
        texts: dict[Engine, Generator[None, None, None]] = {}
        while self._has_work(texts):
            for request in self._start_next(texts):
                texts[request.engine] = self._serve(request)
            for engine in tuple(texts):
                began_s = time.monotonic()
                try:
                    next(texts[engine])
                except StopIteration:
                    del texts[engine]
                queue = self._queues[engine]
                queue.used_s += time.monotonic() - began_s
                if engine not in texts:
                    self._finish(queue)

    def _has_work(self, texts: dict[Engine, Generator[None, None, None]]) -> bool:
        """Wait until there is work and return True; False when the queue is closed and all is done."""
        with self._changed:
            while not (has_work := bool(texts) or self._is_any_waiting()) and not self._is_closed:
                self._changed.wait()
        return has_work

    def _is_any_waiting(self) -> bool:
        return any(len(queue.waiting) for queue in self._queues.values())

    def _start_next(self, texts: dict[Engine, Generator[None, None, None]]) -> list[QueuedRequest]:
        """Take the next request of each engine that is idle."""
        started = []
        with self._changed:
            for engine, queue in self._queues.items():
                if len(queue.waiting) and engine not in texts:
                    queue.serving, queue.started_s, queue.used_s = queue.waiting.next(), time.monotonic(), 0.0
                    started.append(queue.serving)
                    self._set_waiting_gauge(engine)
        return started

    def _finish(self, queue: _EngineQueue) -> None:
        """Charge the request that has ended to its client, and mark the engine idle."""
        with self._changed:
            assert queue.serving is not None
            queue.waiting.charge(queue.serving.client, queue.used_s)
            queue.durations_s.append(time.monotonic() - queue.started_s)
            queue.serving = None

    def _serve(self, request: QueuedRequest) -> Generator[None, None, None]:
        """Decode all texts of a request; yield after every pass but the last of each text."""
        try:
            for index in range(len(request.texts)):
                yield from self._decode(request, index)
        except Exception as exc:  # one request's failure must not end the thread that serves all others
            if not isinstance(exc, OmnidraftError):
                logger.exception("request %s failed", request.request_id)
            self._end(request, exc)
        else:
            self._end(request, None)

    def _decode(self, request: QueuedRequest, index: int) -> Generator[None, None, None]:
        """Decode one text of a request; yield after every pass but the last.

        Raises:
            Abandoned: at the first step after the client went away.
            Stopping: at the first step after the deadline.
        """
        self._check_aborted(request)
        text, first = request.texts[index], request.texts[0].stream
        if first is not None:
            text.stats = DecodeStats()  # its time begins now
        text.stream = request.engine.stream(text.request, first.snapshot if first else None)
        with closing(text.stream.steps) as steps:
            for step in steps:
                text.stats.take(step)
                request.put((index, step))
                if step.finish_reason is not None:
                    continue
                self._check_aborted(request)
                yield

    def _check_aborted(self, request: QueuedRequest) -> None:
        if request.is_abandoned:
            raise Abandoned("the client went away")
        if self._is_past_deadline:
            raise Stopping("the worker stopped before this text's end; ask another one")

    def _end(self, request: QueuedRequest, error: Exception | None) -> None:
        """Count a request, observe its statistics, and hand the end over to its reader."""
        self._count(request, error)
        target, stats = request.engine.pair.target, request.stats
        if stats.num_passes:
            first_token_s = request.texts[0].stats.first_token_s
            self._metrics.observe("omnidraft_time_to_first_token_seconds", first_token_s, target=target)
        if stats.agreement is not None:
            self._metrics.observe("omnidraft_agreement_ratio", stats.agreement, target=target)
        request.put(error)

    def _count(self, request: QueuedRequest, error: Exception | None) -> None:
        self._metrics.add("omnidraft_requests_total", status=_status(error), target=request.engine.pair.target)

    def _set_waiting_gauge(self, engine: Engine) -> None:
        self._metrics.set("omnidraft_requests_waiting", len(self._queues[engine].waiting), target=engine.pair.target)


def _status(error: Exception | None) -> str:
    """Return the label of the counter of requests."""
    match error:
        case None:
            return "ok"
        case Abandoned():
            return "abandoned"
        case _:
            return type(error).__name__
