"""Remembers what a worker says, for the suffix memory of later texts in the same scope."""

from omnidraft.decode.drafting.suffix_source import scope_of
from omnidraft.decode.step_telemetry import StepObserver
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.ports import Request, Step


class TextMemorizer(StepObserver):
    """Remembers the answer to one request when it ends, also early, unless all texts were forgotten meanwhile. The
    token that ends a stop string, which may reach behind it, is left out."""

    def __init__(self, recent: RecentTexts, request: Request) -> None:
        self._recent = recent
        self._scope = scope_of(request)
        self._emitted: list[int] = []
        self._num_clears = recent.num_clears

    def take(self, step: Step) -> None:
        """See StepObserver."""
        self._emitted += step.emitted if step.stop_string is None else step.emitted[:-1]

    def end(self, error: Exception | None) -> None:
        """See StepObserver."""
        if self._recent.num_clears == self._num_clears:
            self._recent.add(self._scope, self._emitted)
        self._emitted = []
