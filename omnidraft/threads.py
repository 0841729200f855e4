"""Threads beside the work: calls that may hang, and threads whose death is told."""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeVar, cast

logger = logging.getLogger(__name__)


CHECK_S = 0.2
"""Seconds between two turns at the other work while a call is not answered."""

Result = TypeVar("Result")
Service = TypeVar("Service")


def within(timeout_s: float, call: Callable[[], Result]) -> Result:
    """Return what the call returns. Raises what it raises; TimeoutError: it goes on, and its result is lost."""
    future = started(call)
    if not wait([future], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return future.result()


def beside(meanwhile: Callable[[], None], call: Callable[[], Result]) -> Result:
    """Return what the call returns, or raise what it raises; until then the calling thread calls `meanwhile` again and
    again, which must not raise."""
    future = started(call)
    while not wait([future], CHECK_S).done:
        meanwhile()
    return future.result()


def attentive(service: Service, meanwhile: Callable[[], None]) -> Service:
    """Return the same service, each of whose methods runs `beside` what its caller does meanwhile."""
    return cast(Service, _Attentive(service, meanwhile))


class _Attentive:
    def __init__(self, service: Any, meanwhile: Callable[[], None]) -> None:
        self._service, self._meanwhile = service, meanwhile

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._service, name)
        return lambda *args, **options: beside(self._meanwhile, partial(method, *args, **options))


def started(call: Callable[[], Result]) -> Future[Result]:
    """Return the result to be of a call in a daemon thread of its own."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # for the thread that waits
            future.set_exception(exc)

    threading.Thread(target=copy_context().run, args=(run,), name="call", daemon=True).start()
    return future


class Supervised(Protocol):
    """A part of a process that may fail while the process lives."""

    @property
    def problem(self) -> str | None:
        """Why it no longer works, for operators; None while it works, or after it was stopped."""


class SupervisedThread(threading.Thread):
    """A daemon thread that records the exception it ended with."""

    def __init__(self, run: Callable[[], None], *, name: str, is_over: Callable[[], bool]) -> None:
        """
        Args:
            is_over: returns whether the thread has been stopped.
        """
        super().__init__(target=run, name=name, daemon=True)
        self._is_over = is_over
        self._died_of = ""

    @property
    def problem(self) -> str | None:
        has_ended = self.ident is not None and not self.is_alive()
        if not has_ended or (self._is_over() and not self._died_of):
            return None
        return f"the {self.name} thread ended{self._died_of}; restart this process"

    def run(self) -> None:
        try:
            super().run()
        except Exception as exc:  # the supervisor: whatever it died of, the process says so from now on
            self._died_of = f": {type(exc).__name__}: {exc}"
            logger.exception("the %s thread ended", self.name)


def first_problem(parts: Iterable[Supervised]) -> str | None:
    """Return the problem of the first part that has one."""
    return next((problem for part in parts if (problem := part.problem)), None)
