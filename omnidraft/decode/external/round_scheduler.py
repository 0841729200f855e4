"""Rounds of another engine: it passes the tokens that it emitted for each sequence, and receives drafts.

It passes no request ids, no settings and no ends (sequence_tracker.py identifies sequences all the same). A sequence
keeps its snapshot as long as it is tracked, so that no swap makes the drafter read running sequences again.
Like in safe_drafting.py, no exception gets out: the engine receives no drafts. Sequences that failed together are
drafted for one by one in the next round, so that the one at fault is found; it gets no more drafts.
Shapes: N rows of logits of one sequence, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from omnidraft.decode.drafting.safe_drafting import DraftingFailures, require_harmless
from omnidraft.decode.external.batch_drafting import BatchDraft, draft_batch
from omnidraft.decode.external.batch_policy import BatchPolicy, FixedBatchPolicy
from omnidraft.decode.external.sequence_tracker import ExternalSequence, SequenceTracker, draft_groups
from omnidraft.decode.external.step_time_model import StepTimeModel
from omnidraft.decode.logprobs import top_k_logprobs
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.decode.step_telemetry import count_step
from omnidraft.ports import DraftTree, FinishReason, Metrics, Step, Timings, TreeLimits


class SequenceFactory(Protocol):
    """Begins sequences."""

    def open(self, prompt_ids: np.ndarray) -> ExternalSequence:
        """Return a new sequence with the snapshot that it keeps."""


LogitsOf = Callable[[Sequence[int]], Sequence[torch.Tensor] | None]
"""Number of rows of each sequence of this round -> the logits [N, V] of each; None where they are not available."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Resource limits of a host."""

    num_tokens: Callable[[], int]
    """Draft tokens per sequence and round at most; read in each round."""
    drafter_ids: int
    """Ids of all sequences together in the drafter's KV cache at most."""
    trace_rows: int
    """Rows of a round whose logits are read for traces at most; rounds with more are recorded without."""
    idle_s: float
    """Seconds without a round after which all sequences count as inactive."""


@dataclass(frozen=True, slots=True)
class _Round:
    """The last round."""

    seqs: tuple[ExternalSequence, ...]
    num_nodes: int
    step_rows: tuple[int, ...]
    at_s: float


class RoundScheduler:
    """Drafts round by round. One thread at a time."""

    def __init__(
        self,
        factory: SequenceFactory,
        tracker: SequenceTracker[ExternalSequence],
        policy: BatchPolicy,
        passes: StepTimeModel,
        step_s: CostCurve | None,
        metrics: Metrics,
        *,
        target: str,
        stop_ids: frozenset[int],
        top_k: int,
        limits: RoundLimits,
        failures: DraftingFailures,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._factory = factory
        self._tracker = tracker
        self._policy = policy
        self._passes = passes
        self._step_s = step_s
        self._metrics = metrics
        self._target = target
        self._stop_ids = stop_ids
        self._top_k = top_k
        self._limits = limits
        self._failures = failures
        self._clock = clock
        self._last_round: _Round | None = None

    def next(
        self, emitted: Sequence[Sequence[int]], ids_of: Callable[[int], np.ndarray], logits_of: LogitsOf
    ) -> list[list[int]]:
        """Return draft tokens per sequence, given the tokens that the engine emitted; none while it reads a prompt.

        Args:
            ids_of: index of a sequence -> all its ids, those just emitted included.
        """
        try:
            return self._next(emitted, ids_of, logits_of)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._reset(exc)
            return [[] for _ in emitted]

    def _next(
        self, emitted: Sequence[Sequence[int]], ids_of: Callable[[int], np.ndarray], logits_of: LogitsOf
    ) -> list[list[int]]:
        now_s = self._clock()
        seqs = self._match(emitted, ids_of)
        active = [seq for seq in seqs if seq is not None]
        pass_s = self._update_costs(seqs, emitted, now_s)
        self._observe(seqs, emitted, pass_s, logits_of)
        self._end_records(self._tracker.set_active(active))
        self._evict()
        drafts = self._draft(active)
        return [drafts.get(id(seq), []) for seq in seqs]

    def tick(self) -> None:
        """End and evict inactive sequences, also when no round comes; called about every second."""
        try:
            self._tick()
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._reset(exc)

    def _tick(self) -> None:
        if self._last_round is None or self._clock() - self._last_round.at_s > self._limits.idle_s:
            self._last_round = None
            self._end_records(self._tracker.set_active(()))
        self._evict()
        self._metrics.set("omnidraft_followed_texts", len(self._tracker), target=self._target)
        self._metrics.set("omnidraft_drafter_ids", self._num_cached_ids(), target=self._target)

    def close(self) -> None:
        """Write all records; no more rounds come."""
        self._last_round = None
        self._end_records(self._tracker.set_active(()))

    def _reset(self, error: Exception) -> None:
        """Forget all sequences, with their unrecorded steps, because the state of the failed round is unknown; those
        that continue are opened again."""
        self._failures.report(error)
        self._last_round = None
        for seq in self._tracker.clear():
            seq.drafting.release()

    def _match(
        self, emitted: Sequence[Sequence[int]], ids_of: Callable[[int], np.ndarray]
    ) -> list[ExternalSequence | None]:
        """Return the sequence at each index; None where nothing was emitted."""
        matches: list[ExternalSequence | None] = []
        for index, new_ids in enumerate(emitted):
            if not new_ids:
                matches.append(None)
                continue
            ids = ids_of(index)
            before = ids[: len(ids) - len(new_ids)]
            seq = self._tracker.find(before, [each for each in matches if each is not None])
            matches.append(self._open(before) if seq is None else seq)
        return matches

    def _open(self, prompt_ids: np.ndarray) -> ExternalSequence | None:
        """Return a new sequence; None, until the next round, where it cannot be opened."""
        try:
            seq = self._factory.open(prompt_ids)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._failures.report(exc)
            return None
        self._tracker.add(seq)
        return seq

    def _update_costs(
        self, seqs: Sequence[ExternalSequence | None], emitted: Sequence[Sequence[int]], now_s: float
    ) -> float:
        """Update costs and policy with the pass since the last round; return its seconds, 0 when it is no sample
        because it also read prompts or the engine waited."""
        last, self._last_round = self._last_round, None
        if last is None or {id(seq) for seq in seqs} != {id(seq) for seq in last.seqs}:
            return 0.0
        pass_s = now_s - last.at_s
        self._passes.update(len(last.seqs) + last.num_nodes, pass_s)
        self._policy.update(sum(map(len, emitted)), last.num_nodes, last.step_rows)
        return pass_s

    def _observe(
        self,
        seqs: Sequence[ExternalSequence | None],
        emitted: Sequence[Sequence[int]],
        pass_s: float,
        logits_of: LogitsOf,
    ) -> None:
        num_rows = [1 if seq is None else len(seq.tree) for seq in seqs]
        is_traced = any(seq is not None and seq.record_builder is not None for seq in seqs)
        is_traced = is_traced and sum(num_rows) <= self._limits.trace_rows
        logits = logits_of(num_rows) if is_traced else None
        for index, (seq, new_ids) in enumerate(zip(seqs, emitted, strict=True)):
            if seq is None:
                continue
            step = self._step(seq, new_ids, pass_s, None if logits is None else logits[index])
            count_step(self._metrics, step, self._target, str(seq.snapshot.version))
            if seq.record_builder is not None:
                seq.record_builder.take(step)
                if new_ids[-1] in self._stop_ids:  # most likely over: the engine may not come back to say so
                    seq.record_builder.flush(FinishReason.STOP)
            if not seq.is_disabled:
                self._drafter_observes(seq, new_ids)
            self._tracker.append(seq, new_ids)

    def _drafter_observes(self, seq: ExternalSequence, new_ids: Sequence[int]) -> None:
        try:
            seq.drafting.observe(new_ids)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._on_failure([seq], exc)

    def _step(self, seq: ExternalSequence, ids: Sequence[int], pass_s: float, logits_NV: torch.Tensor | None) -> Step:
        path, node = [], 0
        for token in ids:
            child = seq.tree.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        traced = None
        if seq.record_builder is not None and logits_NV is not None and len(ids) <= len(logits_NV):
            traced = top_k_logprobs(logits_NV.float(), range(len(ids)), ids, self._top_k)
        return Step(seq.tree, tuple(ids), tuple(path), "", None, Timings(seq.draft_s, pass_s), traced)

    def _end_records(self, inactive: Sequence[ExternalSequence]) -> None:
        for seq in inactive:
            seq.tree = DraftTree.empty(seq.drafting.root)
            is_over = int(seq.tokens.ids[-1]) in self._stop_ids
            if seq.record_builder is not None:
                seq.record_builder.flush(FinishReason.STOP if is_over else None)
            if is_over:
                self._end(seq)
                self._tracker.remove(seq)

    def _evict(self) -> None:
        for seq in self._tracker.evict():
            self._end(seq)

    def _end(self, seq: ExternalSequence) -> None:
        seq.drafting.release()
        self._policy.finish(len(seq.tokens) - seq.num_prompt)

    def _draft(self, active: Sequence[ExternalSequence]) -> dict[int, list[int]]:
        """Return the draft tokens by the identity of a sequence."""
        if not active:
            return {}
        policy, num_tokens = self._policy, self._limits.num_tokens()
        policy.start(len(active))
        probe_length = self._passes.probe_length(len(active), num_tokens)
        if probe_length is not None:
            policy, num_tokens = FixedBatchPolicy(), probe_length
        num_nodes, step_rows = 0, []
        for group in draft_groups(active):
            batch_draft = self._draft_group(group, num_tokens, policy)
            num_nodes += sum(len(tree) - 1 for tree in batch_draft.trees)
            step_rows += batch_draft.step_rows
        self._last_round = _Round(tuple(active), num_nodes, tuple(step_rows), self._clock())
        return {id(seq): list(seq.tree.tokens[1:]) for seq in active}

    def _draft_group(self, group: Sequence[ExternalSequence], num_tokens: int, policy: BatchPolicy) -> BatchDraft:
        try:
            states = [seq.drafting for seq in group]
            batch_draft = draft_batch(states, num_tokens, policy, self._step_s, may_open=self._fits_memory)
            for seq, tree in zip(group, batch_draft.trees, strict=True):
                size = len(seq.drafting.drafter.target_vocabulary)
                require_harmless(tree, seq.drafting.root, TreeLimits(num_tokens, num_chains=1), size)
                seq.tree, seq.draft_s, seq.is_suspect = tree, batch_draft.draft_s, False
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._on_failure(group, exc)
            return BatchDraft()
        return batch_draft

    def _on_failure(self, group: Sequence[ExternalSequence], error: Exception) -> None:
        """Report the exception and release the sequences, whose KV cache in the drafter is in an unknown state."""
        self._failures.report(error)
        for seq in group:
            seq.failed(is_alone=len(group) == 1)

    def _fits_memory(self, num_ids: int) -> bool:
        """Return whether the drafter may cache so many more ids; inactive sequences are released first."""
        num_cached = self._num_cached_ids()
        for seq in self._tracker.inactive:
            if num_cached + num_ids <= self._limits.drafter_ids:
                break
            num_cached -= len(seq.drafting.fed)
            seq.drafting.release()
        return num_cached + num_ids <= self._limits.drafter_ids

    def _num_cached_ids(self) -> int:
        return sum(len(seq.drafting.fed) for seq in self._tracker)
