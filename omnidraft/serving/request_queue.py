"""Requests wait in a fair line for each target; one thread decodes, a pass of each in turn; full lines refuse."""

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

REMEMBERED = 32
"""Requests whose time in service tells how long the next ones will take."""
MOST_RETRY_S = 60
"""Clients of OpenAI's take no Retry-After above this."""
LAST_STEP_S = 2.0
"""How long closing waits for the pass under way, after the deadline."""


class QueueFull(OmnidraftError):
    """Too many requests wait; try again after `retry_after_s` (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(OmnidraftError):
    """The worker is about to end; ask another one (HTTP 503)."""


class Abandoned(OmnidraftError):
    """The client went away; nobody reads the answer."""


@dataclass(slots=True)
class _Lane:
    """One engine's line, and what its last requests took."""

    line: FairQueue = field(default_factory=FairQueue)
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """From a request's turn to its end."""
    serving: QueuedRequest | None = None
    started_s: float = 0.0
    """When its turn came."""
    used_s: float = 0.0
    """What it has computed since."""

    def retry_after_s(self) -> int:
        """Whole seconds until half of what waits will have been served."""
        so_far_s = time.monotonic() - self.started_s if self.serving else 0.0
        mean_s = fmean(self.took_s) if self.took_s else so_far_s
        return max(1, min(MOST_RETRY_S, ceil(mean_s * (len(self.line) + 1) / 2)))


class RequestQueue:
    """A bounded line for each engine, all before one decoding thread.

    Of each engine one text is under way at a time, and these texts take turns, a target pass each. So two targets
    never compute at once, and nobody waits for a long text of another target, nor for its line.
    """

    def __init__(self, metrics: Metrics, *, max_waiting: int) -> None:
        """`max_waiting` requests may wait for each engine, besides the one under way."""
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._lanes: defaultdict[Engine, _Lane] = defaultdict(_Lane)
        self._is_closed = False
        self._is_cut = False
        self._changed = threading.Condition()  # over all of the above
        self._thread = SupervisedThread(self._run, name="decoding", is_over=lambda: self._is_closed)
        self._thread.start()

    def submit(self, ticket: QueuedRequest) -> QueuedRequest:
        """The same ticket. Raises QueueFull, Stopping."""
        with self._changed:
            lane = self._lanes[ticket.engine]
            try:
                self._let_in(lane, ticket)
            except (QueueFull, Stopping) as exc:
                self._count(ticket, exc)
                raise
            lane.line.add(ticket)
            self._tell_waiting(ticket.engine)
            self._changed.notify()
        return ticket

    def give_up(self, ticket: QueuedRequest) -> None:
        """Its client went away: it leaves the line, or ends at its next step."""
        ticket.is_abandoned = True
        with self._changed:
            was_waiting = self._lanes[ticket.engine].line.remove(ticket)
            self._tell_waiting(ticket.engine)
        if was_waiting:
            self._end(ticket, Abandoned("the client went away before its turn"))

    @property
    def is_alive(self) -> bool:
        """Whether the decoding thread still runs; a dead one is for the operator to restart."""
        return self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """Why it does not decode; None while it does."""
        return None if self.is_alive else self._thread.problem or "the decoding thread ended"

    @property
    def is_open(self) -> bool:
        """Whether new requests are taken."""
        return self.is_alive and not self._is_closed

    def stop_accepting(self) -> None:
        """From now on refuse; what was accepted goes on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Refuse what comes, finish what was accepted within `timeout_s`, and end the rest with Stopping."""
        self.stop_accepting()
        self._thread.join(timeout_s)
        with self._changed:
            self._is_cut = True
            late = [ticket for lane in self._lanes.values() for ticket in lane.line.clear()]
        for ticket in late:
            self._end(ticket, Stopping("the worker stopped before this request's turn; ask another one"))
        self._thread.join(LAST_STEP_S)

    def _let_in(self, lane: _Lane, ticket: QueuedRequest) -> None:
        """Raises QueueFull, Stopping; a full line may give up another payer's newest request instead."""
        if not self.is_open:
            raise Stopping("the worker is stopping; ask another one")
        if len(lane.line) < self._max_waiting:
            return
        full = QueueFull(f"{self._max_waiting} requests are waiting already; try again later", lane.retry_after_s())
        pushed_out = lane.line.make_room(ticket.client)
        if pushed_out is None:
            raise full
        self._end(pushed_out, full)

    def _run(self) -> None:
        texts: dict[Engine, Generator[None, None, None]] = {}
        while self._has_work(texts):
            for ticket in self._next_tickets(texts):
                texts[ticket.engine] = self._served(ticket)
            for engine in tuple(texts):
                began_s = time.monotonic()
                try:
                    next(texts[engine])
                except StopIteration:
                    del texts[engine]
                lane = self._lanes[engine]
                lane.used_s += time.monotonic() - began_s
                if engine not in texts:
                    self._leave(lane)

    def _has_work(self, texts: dict[Engine, Generator[None, None, None]]) -> bool:
        """Waits for some; False when closed and all is done."""
        with self._changed:
            while not (has_work := bool(texts) or self._is_anyone_waiting()) and not self._is_closed:
                self._changed.wait()
        return has_work

    def _is_anyone_waiting(self) -> bool:
        return any(len(lane.line) for lane in self._lanes.values())

    def _next_tickets(self, texts: dict[Engine, Generator[None, None, None]]) -> list[QueuedRequest]:
        """The next of each line whose engine is free."""
        tickets = []
        with self._changed:
            for engine, lane in self._lanes.items():
                if len(lane.line) and engine not in texts:
                    lane.serving, lane.started_s, lane.used_s = lane.line.next(), time.monotonic(), 0.0
                    tickets.append(lane.serving)
                    self._tell_waiting(engine)
        return tickets

    def _leave(self, lane: _Lane) -> None:
        """Its ticket has ended."""
        with self._changed:
            assert lane.serving is not None
            lane.line.pay(lane.serving.client, lane.used_s)
            lane.took_s.append(time.monotonic() - lane.started_s)
            lane.serving = None

    def _served(self, ticket: QueuedRequest) -> Generator[None, None, None]:
        """Decodes one ticket, and stops after every pass but the last."""
        try:
            for index in range(len(ticket.texts)):
                yield from self._decoded(ticket, index)
        except Exception as exc:  # one request's failure must not end the thread that serves all others
            if not isinstance(exc, OmnidraftError):
                logger.exception("request %s failed", ticket.request_id)
            self._end(ticket, exc)
        else:
            self._end(ticket, None)

    def _decoded(self, ticket: QueuedRequest, index: int) -> Generator[None, None, None]:
        """Raises what decoding raises, Abandoned at the first step after the client went away, Stopping at the first
        after the deadline."""
        self._check(ticket)
        text, first = ticket.texts[index], ticket.texts[0].answer
        if first is not None:
            text.figures = DecodeStats()  # its time begins now
        text.answer = ticket.engine.stream(text.question, first.snapshot if first else None)
        with closing(text.answer.steps) as steps:
            for step in steps:
                text.figures.take(step)
                ticket.put((index, step))
                if step.finish_reason is not None:
                    continue
                self._check(ticket)
                yield

    def _check(self, ticket: QueuedRequest) -> None:
        if ticket.is_abandoned:
            raise Abandoned("the client went away")
        if self._is_cut:
            raise Stopping("the worker stopped before this text's end; ask another one")

    def _end(self, ticket: QueuedRequest, how: Exception | None) -> None:
        """The last that is heard of it, and its figures."""
        self._count(ticket, how)
        target, figures = ticket.engine.pair.target, ticket.figures
        if figures.num_passes:
            first_token_s = ticket.texts[0].figures.first_token_s
            self._metrics.observe("omnidraft_time_to_first_token_seconds", first_token_s, target=target)
        if figures.agreement is not None:
            self._metrics.observe("omnidraft_agreement_ratio", figures.agreement, target=target)
        ticket.put(how)

    def _count(self, ticket: QueuedRequest, how: Exception | None) -> None:
        self._metrics.add("omnidraft_requests_total", status=_status(how), target=ticket.engine.pair.target)

    def _tell_waiting(self, engine: Engine) -> None:
        self._metrics.set("omnidraft_requests_waiting", len(self._lanes[engine].line), target=engine.pair.target)


def _status(how: Exception | None) -> str:
    """As the counter of requests labels it."""
    match how:
        case None:
            return "ok"
        case Abandoned():
            return "abandoned"
        case _:
            return type(how).__name__
