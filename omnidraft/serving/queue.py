"""One text at a time: requests wait in order for the target, and a full queue refuses."""

import logging
import queue
import threading
from collections.abc import Iterator
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
    """One request's place in the queue. The client reads `steps`; giving up sets `is_abandoned`."""

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
    """A bounded queue before one decoding thread."""

    def __init__(self, engine: Engine, metrics: Metrics, *, max_waiting: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._waiting: queue.Queue[Ticket | None] = queue.Queue(max_waiting)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, question: Question) -> Ticket:
        """Raises QueueFull."""
        ticket = Ticket(question)
        if self._is_closed:
            raise QueueFull("the worker is stopping; ask another one")
        try:
            self._waiting.put_nowait(ticket)
        except queue.Full as exc:
            raise QueueFull(f"{self._waiting.maxsize} requests are waiting already; try again later") from exc
        self._metrics.set("omnidraft_requests_waiting", self._waiting.qsize())
        return ticket

    @property
    def is_alive(self) -> bool:
        """Whether the decoding thread still runs; a dead one is for the operator to restart."""
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Finish what was accepted, refuse the rest."""
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (ticket := self._waiting.get()) is not None:
            self._metrics.set("omnidraft_requests_waiting", self._waiting.qsize())
            self._metrics.add("omnidraft_requests_total", status=self._serve(ticket))
            if ticket.figures.num_passes:
                self._metrics.observe("omnidraft_time_to_first_token_seconds", ticket.figures.first_token_s)

    def _serve(self, ticket: Ticket) -> str:
        """How it ended. The text is given up at the first step after its client went away."""
        try:
            if ticket.is_abandoned:
                raise Abandoned("the client went away before its turn")
            ticket.answer = self._engine.answer(ticket.question)
            with closing(ticket.answer.steps) as steps:
                for step in steps:
                    ticket.figures.take(step)
                    ticket.put(step)
                    if ticket.is_abandoned and step.finish_reason is None:
                        raise Abandoned("the client went away")
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
