"""Metrics and OpenTelemetry spans of decoding steps, added while the steps pass by.

DraftTree.scored_positions says which positions are scored and which agreed.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial

from omnidraft.ports import Metrics, Span, Step, Tracing

_PREFIX = "omnidraft_spec_decode_num_"

_Add = Callable[..., None]


def count_steps(
    steps: Iterator[Step], metrics: Metrics, target: str, drafter_version: str, plain_pass_s: float | None
) -> Generator[Step, None, None]:
    """Yield the steps of one text and count each, with the time between its tokens; the tokens of one pass share its
    time."""
    last_s: float | None = None
    for step in steps:
        count_step(metrics, step, target, drafter_version, plain_pass_s)
        now_s = time.perf_counter()
        if last_s is not None:
            for _ in step.emitted:
                gap_s = (now_s - last_s) / len(step.emitted)
                metrics.observe("omnidraft_inter_token_latency_seconds", gap_s, target=target)
        last_s = now_s
        yield step


def count_step(
    metrics: Metrics, step: Step, target: str, drafter_version: str, plain_pass_s: float | None = None
) -> None:
    """Count one step. `plain_pass_s` is the duration of a pass without a draft; None where it was not measured."""
    add = partial(metrics.add, target=target, drafter_version=drafter_version)
    add("omnidraft_target_passes_total")
    add("omnidraft_emitted_tokens_total", len(step.emitted))
    num_accepted = len(step.path)
    name = "omnidraft_spec_decode_accepted_tokens_per_pass"
    metrics.observe(name, num_accepted, target=target, drafter_version=drafter_version)
    _count_seconds(add, step, plain_pass_s)
    _count_sources(add, step)
    _count_positions(add, step)


def _count_seconds(add: _Add, step: Step, plain_pass_s: float | None) -> None:
    spent = step.timings
    for part, seconds in (("draft", spent.draft_s), ("target", spent.target_s), ("other", spent.other_s)):
        add("omnidraft_decode_seconds_total", seconds, part=part)
    if plain_pass_s is not None:
        add("omnidraft_plain_decode_seconds_total", plain_pass_s * len(step.emitted))


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


def span_steps(steps: Iterator[Step], tracing: Tracing, span: Span, *, has_passes: bool) -> Iterator[Step]:
    """Yield the steps; `span` ends with the last one, or when the caller stops reading."""
    num_passes = num_tokens = num_drafted = num_accepted = 0
    outcome: dict[str, str] = {"finish_reason": "abandoned"}
    try:
        for step in steps:
            num_passes, num_tokens = num_passes + 1, num_tokens + len(step.emitted)
            num_drafted, num_accepted = num_drafted + len(step.tree) - 1, num_accepted + len(step.path)
            if has_passes:
                _add_pass_span(step, tracing, span)
            if step.finish_reason is not None:
                outcome = {"finish_reason": step.finish_reason.value}
            yield step
    finally:
        error = sys.exception()
        if error is not None and not isinstance(error, GeneratorExit):
            outcome = {"error": type(error).__name__}
        span.end(passes=num_passes, tokens=num_tokens, drafted=num_drafted, accepted=num_accepted, **outcome)


def _add_pass_span(step: Step, tracing: Tracing, span: Span) -> None:
    spent = step.timings
    sources = ",".join(sorted({str(source) for source in step.tree.sources if source}))
    tracing.begin(
        "pass",
        parent=span.context,
        ago_s=spent.draft_s + spent.target_s + spent.other_s,
        drafted=len(step.tree) - 1,
        sources=sources,
        accepted=len(step.path),
        tokens=len(step.emitted),
        draft_s=spent.draft_s,
        target_s=spent.target_s,
    ).end()
