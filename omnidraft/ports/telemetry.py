"""Telemetry: metrics that add up over a fleet, and spans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Metrics(Protocol):
    """Counters and distributions; names end in their unit. Never raises."""

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...

    def set(self, name: str, value: float, **labels: str) -> None: ...


class Span(Protocol):
    """One piece of work under way. Any thread may end it, once; what is not ended is never told. Never raises."""

    @property
    def context(self) -> str | None:
        """The W3C traceparent that names it to those who go on from it; None: there is nothing to go on from."""

    def end(self, **facts: str | float | bool) -> None:
        """The fact `error` says what went wrong, if anything did."""


class Tracing(Protocol):
    """Where spans go. Nobody waits for it: what it cannot get rid of is dropped. Never raises."""

    is_on: bool
    """Whether anybody sees the spans; those that are many are begun only then."""

    def begin(
        self,
        name: str,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
        ago_s: float = 0.0,
        **facts: str | float | bool,
    ) -> Span:
        """`parent` and `links` are contexts; without a parent a trace begins. `ago_s` seconds ago it began."""

    def close(self, timeout_s: float) -> None:
        """Tell what waits, at most for so long. Nothing may be begun afterwards."""


@dataclass(frozen=True, slots=True)
class NoopSpan:
    """A Span that nobody sees: whoever goes on from it goes on from what came before."""

    context: str | None

    def end(self, **facts: str | float | bool) -> None: ...


class NoopTracing:
    """The Tracing of a process that is not traced."""

    is_on = False

    def begin(self, name: str, *, parent: str | None = None, **_: object) -> NoopSpan:
        return NoopSpan(parent)

    def close(self, timeout_s: float) -> None: ...
