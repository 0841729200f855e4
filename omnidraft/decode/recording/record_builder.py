"""Builds trace records from steps: one per request, or one per SEGMENT_TOKENS emitted tokens of a long one.

Shapes: as in traces/record.py.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from omnidraft.decode.sampling.logits_pipeline import Limits
from omnidraft.decode.step_telemetry import StepObserver
from omnidraft.params import numbers_of
from omnidraft.ports import FinishReason, Request, Step
from omnidraft.traces.record import SOURCES, STOP_STRING, Rounds, TargetLogprobs, TraceRecord, fields_of

SEGMENT_TOKENS = 256
"""Emitted tokens per record: a long answer is learned from while it goes on, and its prompt is not sent too often."""
WINDOW_TOKENS = 1024
"""Earlier ids that a later segment of a long answer contains as context: more than a learner reads of them."""


@dataclass(frozen=True, slots=True)
class RecordContext:
    """The fields that all records of one request share."""

    request_id: str
    tenant: str
    worker: str
    target: str
    drafter: str
    snapshot_version: int | None
    alignment: str
    traceparent: str | None = None
    has_settings: bool = True
    """Whether the decoding settings of the request are known."""


class TraceRecordBuilder(StepObserver):
    """Collects the steps of one request and emits a record whenever a segment is full or the text ends; one that ends
    early is recorded up to its last full segment."""

    def __init__(
        self,
        request: Request,
        context: RecordContext,
        emit: Callable[[TraceRecord], None],
        *,
        segment_tokens: int = SEGMENT_TOKENS,
        window_tokens: int = WINDOW_TOKENS,
    ) -> None:
        self._request = request
        self._context = context
        self._emit = emit
        self._segment_tokens, self._window_tokens = segment_tokens, window_tokens
        self._steps: list[Step] = []
        self._before: list[int] = []
        self._segment = 0

    def take(self, step: Step) -> None:
        """Add a step; emit the segment that it does not fit into, and the last one. Steps stay whole, so a segment may
        end a few tokens early."""
        if self._num_emitted() + len(step.emitted) > self._segment_tokens and self._steps:
            self._flush(None)
        self._steps.append(step)
        if step.finish_reason is not None:
            self._flush(STOP_STRING if step.stop_string is not None else step.finish_reason.value)

    def flush(self, reason: FinishReason | None) -> None:
        """Emit the rest of a text that ends without a finishing step; `reason` is None where it is unknown. Steps may
        still follow."""
        if self._steps:
            self._flush(None if reason is None else reason.value)

    def move(self, snapshot_version: int | None) -> None:
        """End the record here, since another snapshot drafts from now on."""
        self.flush(None)
        self._context = replace(self._context, snapshot_version=snapshot_version)

    def _num_emitted(self) -> int:
        return sum(len(step.emitted) for step in self._steps)

    def _flush(self, finish_reason: str | None) -> None:
        emitted = [token for step in self._steps for token in step.emitted]
        request, sampling = self._request, self._request.sampling
        window = self._window_tokens
        has_budget = request.thoughts is not None and request.thoughts.budget is not None
        self._emit(
            TraceRecord(
                **asdict(self._context),
                segment=self._segment,
                time_ms=int(time.time() * 1000),
                drafter_prompt_ids=_ids(request.drafter_prompt_ids),
                prompt_ids=_ids(request.prompt_ids),
                before_ids=_ids(self._before[-window:] if window else ()),
                emitted_ids=_ids(emitted),
                beliefs=_concatenate(self._steps),
                rounds=_rounds(self._steps),
                finish_reason=finish_reason,
                mode=request.mode,
                seed=request.seed,
                **numbers_of(sampling),
                has_logit_bias=bool(sampling.logit_bias) or Limits.are_needed(request) or has_budget,
                has_grammar=sampling.grammar is not None,
                noise_weight=_noise_weight(self._steps),
            )
        )
        self._before += emitted
        self._steps, self._segment = [], self._segment + 1


def _ids(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.uint32)


def _noise_weight(steps: Sequence[Step]) -> float | None:
    """Return the largest weight; None when nothing was drafted."""
    weights = [step.tree.noise_weight for step in steps if step.tree.noise_weight is not None]
    return max(weights, default=None)


def _concatenate(steps: Sequence[Step]) -> TargetLogprobs | None:
    parts = [step.target_logprobs for step in steps if step.target_logprobs is not None]
    if len(parts) < len(steps):
        return None
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields_of(TargetLogprobs)}
    return TargetLogprobs(**{name: np.concatenate(column) for name, column in columns.items()})


def _rounds(steps: Sequence[Step]) -> Rounds:
    trees = [step.tree for step in steps]
    accepted = [[node in step.path for node in range(1, len(step.tree))] for step in steps]
    return Rounds(
        num_nodes_R=np.array([len(tree) - 1 for tree in trees], np.uint16),
        num_accepted_R=np.array([len(step.path) for step in steps], np.uint16),
        num_emitted_R=np.array([len(step.emitted) for step in steps], np.uint16),
        num_draft_ids_R=np.array([len(tree.draft_ids) for tree in trees], np.uint16),
        node_ids_M=_ids([token for tree in trees for token in tree.tokens[1:]]),
        parents_M=np.array([parent for tree in trees for parent in tree.parents[1:]], np.uint16),
        sources_M=np.array([SOURCES.index(s) for tree in trees for s in tree.sources if s is not None], np.uint8),
        log_q_M=np.array([log_q for tree in trees for log_q in tree.log_q[1:]], np.float16),
        accepted_M=np.array([is_in for flags in accepted for is_in in flags], np.uint8),
        draft_ids_D=_ids([draft for tree in trees for draft in tree.draft_ids]),
        draft_s_R=np.array([step.timings.draft_s for step in steps], np.float32),
        target_s_R=np.array([step.timings.target_s for step in steps], np.float32),
    )
