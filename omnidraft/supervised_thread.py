"""A thread that its process cannot do without: how it ended is logged, and kept for whoever asks after its health."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

logger = logging.getLogger(__name__)


class Supervised(Protocol):
    """Part of a process that may be dead while the process is not."""

    @property
    def problem(self) -> str | None:
        """Why it does not do its work any more, for people; None while it does, or when it was told to end."""


class SupervisedThread(threading.Thread):
    """Started like any other, and ends with the process."""

    def __init__(self, run: Callable[[], None], *, name: str, is_over: Callable[[], bool]) -> None:
        """`is_over`: whether it was told to end."""
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
    """What is wrong with the first that has a problem."""
    return next((problem for part in parts if (problem := part.problem)), None)
