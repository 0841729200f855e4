"""OpenTelemetry spans of one text and of its passes."""

import sys
from collections.abc import Iterator

from omnidraft.ports import Span, Step, Tracing


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
