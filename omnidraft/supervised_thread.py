"""A thread whose end makes its process unhealthy; the reason is logged and kept for health checks."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

logger = logging.getLogger(__name__)


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
