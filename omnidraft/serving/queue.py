"""Requests wait in a line for each target; one thread decodes, a pass of each target in turn; full lines refuse."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from omnidraft.decode.engine import Answer, Engine, Question
from omnidraft.decode.figures import Figures
from omnidraft.errors import OmnidraftError
from omnidraft.ports import Metrics, Step

logger = logging.getLogger(__name__)


class QueueFull(OmnidraftError):
    """Too many requests wait; try again later (HTTP 429)."""


class Abandoned(OmnidraftError):
    """The client went away; nobody reads the answer."""


@dataclass(slots=True)
class Ticket:
    """One request's place in its engine's line. The client reads `steps`; giving up sets `is_abandoned`."""

    engine: Engine
    question: Question
    figures: Figures = field(default_factory=Figures)
    answer: Answer | None = None
    is_abandoned: bool = False
    _results: "queue.Queue[Step | Exception | None]" = field(default_factory=queue.Queue)

    def steps(self) -> Iterator[Step]:
        """Steps as they come. Raises what decoding raised."""
        try:
            while (result := self._results.get()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            self.is_abandoned = True

    def put(self, result: Step | Exception | None) -> None:
        self._results.put(result)


class RequestQueue:
    """A bounded line for each engine, all before one decoding thread.

    Of each engine one text is under way at a time, and these texts take turns, a target pass each. So two targets
    never compute at once, and nobody waits for a long text of another target, nor for its line.
    """

    def __init__(self, metrics: Metrics, *, max_waiting: int) -> None:
        """`max_waiting` requests may wait for each engine, besides the one under way."""
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._lines: dict[Engine, deque[Ticket]] = {}
        self._is_closed = False
        self._changed = threading.Condition()  # over the lines and _is_closed
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, engine: Engine, question: Question) -> Ticket:
        """Raises QueueFull."""
        ticket = Ticket(engine, question)
        with self._changed:
            if self._is_closed:
                raise QueueFull("the worker is stopping; ask another one")
            line = self._lines.setdefault(engine, deque())
            if len(line) >= self._max_waiting:
                raise QueueFull(f"{self._max_waiting} requests are waiting already; try again later")
            line.append(ticket)
            self._tell_waiting(engine)
            self._changed.notify()
        return ticket

    @property
    def is_alive(self) -> bool:
        """Whether the decoding thread still runs; a dead one is for the operator to restart."""
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Finish what was accepted, refuse the rest."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        texts: dict[Engine, Generator[None, None, None]] = {}
        while self._has_work(texts):
            for ticket in self._next_tickets(texts):
                texts[ticket.engine] = self._text(ticket)
            for engine in tuple(texts):
                try:
                    next(texts[engine])
                except StopIteration:
                    del texts[engine]

    def _has_work(self, texts: dict[Engine, Generator[None, None, None]]) -> bool:
        """Waits for some; False when closed and all is done."""
        with self._changed:
            while not (has_work := bool(texts) or any(self._lines.values())) and not self._is_closed:
                self._changed.wait()
        return has_work

    def _next_tickets(self, texts: dict[Engine, Generator[None, None, None]]) -> list[Ticket]:
        """The first of each line whose engine is free."""
        with self._changed:
            free = [engine for engine, line in self._lines.items() if line and engine not in texts]
            tickets = [self._lines[engine].popleft() for engine in free]
            for engine in free:
                self._tell_waiting(engine)
        return tickets

    def _text(self, ticket: Ticket) -> Generator[None, None, None]:
        """Serves one ticket, and stops after every pass but the last."""
        target = ticket.engine.pair.target
        status = yield from self._serve(ticket)
        self._metrics.add("omnidraft_requests_total", status=status, target=target)
        if ticket.figures.num_passes:
            first_token_s = ticket.figures.first_token_s
            self._metrics.observe("omnidraft_time_to_first_token_seconds", first_token_s, target=target)
        if (agreement := ticket.figures.agreement) is not None:
            self._metrics.observe("omnidraft_agreement_ratio", agreement, target=target)

    def _serve(self, ticket: Ticket) -> Generator[None, None, str]:
        """How it ended. The text is given up at the first step after its client went away."""
        try:
            if ticket.is_abandoned:
                raise Abandoned("the client went away before its turn")
            ticket.answer = ticket.engine.answer(ticket.question)
            with closing(ticket.answer.steps) as steps:
                for step in steps:
                    ticket.figures.take(step)
                    ticket.put(step)
                    if step.finish_reason is not None:
                        continue
                    if ticket.is_abandoned:
                        raise Abandoned("the client went away")
                    yield
        except Abandoned as exc:
            ticket.put(exc)
            return "abandoned"
        except Exception as exc:  # one request's failure must not end the thread that serves all others
            if not isinstance(exc, OmnidraftError):
                logger.exception("request %s failed", ticket.question.request_id)
            ticket.put(exc)
            return type(exc).__name__
        ticket.put(None)
        return "ok"

    def _tell_waiting(self, engine: Engine) -> None:
        self._metrics.set("omnidraft_requests_waiting", len(self._lines[engine]), target=engine.pair.target)
