"""Metrics and OpenTelemetry spans of decoding steps.

DraftTree.scored_positions says which positions are scored and which agreed.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from omnidraft.ports import Metrics, Span, Step, Tracing

_PREFIX = "omnidraft_spec_decode_num_"

_Add = Callable[..., None]


class StepObserver(Protocol):
    """Follows the steps of one text."""

    def take(self, step: Step) -> None:
        """Add a step that has just ended."""

    def move(self, snapshot_version: int | None) -> None:
        """Account for another snapshot that drafts from now on."""
        return

    def end(self, error: Exception | None) -> None:
        """End the text: after its last step, by an error, or because its client went away."""
        return


class StepCounter(StepObserver):
    """Counts every step, with the time between its tokens, which share the time of their pass."""

    def __init__(
        self, metrics: Metrics, target: str, drafter_version: str, plain_token_s: Callable[[], float | None]
    ) -> None:
        """`plain_token_s` returns the seconds that a token takes now without drafts; None where it was not measured."""
        self._metrics = metrics
        self._target = target
        self._drafter_version = drafter_version
        self._plain_token_s = plain_token_s
        self._last_s: float | None = None

    def take(self, step: Step) -> None:
        """See StepObserver."""
        count_step(self._metrics, step, self._target, self._drafter_version, self._plain_token_s())
        now_s = time.perf_counter()
        if self._last_s is not None:
            for _ in step.emitted:
                gap_s = (now_s - self._last_s) / len(step.emitted)
                self._metrics.observe("omnidraft_inter_token_latency_seconds", gap_s, target=self._target)
        self._last_s = now_s

    def move(self, snapshot_version: int | None) -> None:
        """See StepObserver."""
        self._drafter_version = str(snapshot_version)


class TextSpan(StepObserver):
    """A span for the text, which names the snapshot that it began with, and one for each pass."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._num_passes = self._num_tokens = self._num_drafted = self._num_accepted = 0
        self._outcome = {"finish_reason": "abandoned"}

    def take(self, step: Step) -> None:
        """See StepObserver."""
        self._num_passes += 1
        self._num_tokens += len(step.emitted)
        self._num_drafted += len(step.tree) - 1
        self._num_accepted += len(step.path)
        self._add_pass_span(step)
        if step.finish_reason is not None:
            self._outcome = {"finish_reason": step.finish_reason.value}

    def end(self, error: Exception | None) -> None:
        """See StepObserver."""
        outcome = self._outcome if error is None else {"error": type(error).__name__}
        counts = {"passes": self._num_passes, "tokens": self._num_tokens}
        self._span.end(**counts, drafted=self._num_drafted, accepted=self._num_accepted, **outcome)

    def _add_pass_span(self, step: Step) -> None:
        spent = step.timings
        sources = ",".join(sorted({str(source) for source in step.tree.sources if source}))
        self._tracing.begin(
            "pass",
            parent=self._span.context,
            ago_s=spent.draft_s + spent.target_s + spent.other_s,
            drafted=len(step.tree) - 1,
            sources=sources,
            accepted=len(step.path),
            tokens=len(step.emitted),
            draft_s=spent.draft_s,
            target_s=spent.target_s,
        ).end()


def count_step(
    metrics: Metrics, step: Step, target: str, drafter_version: str, plain_token_s: float | None = None
) -> None:
    """Count one step. `plain_token_s` is the duration of a token without drafts; None where it was not measured."""
    add = partial(metrics.add, target=target, drafter_version=drafter_version)
    add("omnidraft_target_passes_total")
    add("omnidraft_emitted_tokens_total", len(step.emitted))
    num_accepted = len(step.path)
    name = "omnidraft_spec_decode_accepted_tokens_per_pass"
    metrics.observe(name, num_accepted, target=target, drafter_version=drafter_version)
    _count_seconds(add, step, plain_token_s)
    _count_sources(add, step)
    _count_positions(add, step)


def _count_seconds(add: _Add, step: Step, plain_token_s: float | None) -> None:
    spent = step.timings
    for part, seconds in (("draft", spent.draft_s), ("target", spent.target_s), ("other", spent.other_s)):
        add("omnidraft_decode_seconds_total", seconds, part=part)
    if plain_token_s is not None:
        add("omnidraft_plain_decode_seconds_total", plain_token_s * len(step.emitted))


def _count_sources(add: _Add, step: Step) -> None:
    for source in sorted({source for source in step.tree.sources if source}):
        nodes = [node for node in range(1, len(step.tree)) if step.tree.sources[node] == source]
        accepted = [node for node in step.path if step.tree.sources[node] == source]
        add(_PREFIX + "drafts_total", source=source)
        add(_PREFIX + "draft_tokens_total", len(nodes), source=source)
        add(_PREFIX + "accepted_tokens_total", len(accepted), source=source)


def _count_positions(add: _Add, step: Step) -> None:
    for depth, node in enumerate(step.path):
        source = str(step.tree.sources[node])
        add(_PREFIX + "accepted_tokens_per_pos_total", source=source, position=str(depth))
    for depth, (candidate, is_agreed) in enumerate(step.tree.scored_positions(step.path, len(step.emitted))):
        source, position = str(step.tree.sources[candidate]), str(depth)
        add("omnidraft_scored_positions_total", source=source, position=position)
        if is_agreed:
            add("omnidraft_agreed_positions_total", source=source, position=position)
