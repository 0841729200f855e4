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
    """One unit of work in progress. Any thread may end it, once; a span that is not ended is not exported. Never
    raises."""

    @property
    def context(self) -> str | None:
        """The W3C traceparent for its children; None: there is no trace to continue."""

    def end(self, **facts: str | float | bool) -> None:
        """End the span; the attribute `error` describes the error, if there was one."""


class Tracing(Protocol):
    """Exports spans. It never blocks: spans that it cannot export are dropped. Never raises."""

    is_on: bool
    """Whether spans are exported; frequent spans are begun only then."""

    def begin(
        self,
        name: str,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
        ago_s: float = 0.0,
        **facts: str | float | bool,
    ) -> Span:
        """Begin a span that started `ago_s` seconds ago. `parent` and `links` are contexts; without a parent a new
        trace begins."""

    def close(self) -> None:
        """Export the queued spans, waiting for a few seconds at most. No span may be begun afterwards."""


@dataclass(frozen=True, slots=True)
class NoopSpan:
    """A Span that is not exported: its children continue the trace of its parent."""

    context: str | None

    def end(self, **facts: str | float | bool) -> None: ...


class NoopTracing:
    """The Tracing of a process that is not traced."""

    is_on = False

    def begin(self, name: str, *, parent: str | None = None, **_: object) -> NoopSpan:
        return NoopSpan(parent)

    def close(self) -> None: ...
