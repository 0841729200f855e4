"""Rounds of another engine: it passes the tokens that it emitted for each sequence, and receives drafts.

It passes no request ids, no settings and no ends, and what a request says about its drafting only where the host can
read it (sequence_tracker.py identifies sequences all the same). A sequence
keeps its snapshot as long as it is tracked, so that no swap makes the drafter read running sequences again.
It uses no noise: an engine that draws with its own accepts a token with the target's probability of it, so the most
probable token is best. Like in safe_drafting.py, no exception gets out: the engine receives no drafts.
Shapes: N rows of logits of one sequence, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from threading import Event

import numpy as np
import torch

from omnidraft import throttle
from omnidraft.decode.drafting.safe_drafting import DraftingFailures, propose_all
from omnidraft.decode.drafting.session_pool import DrafterMemory
from omnidraft.decode.external.request_options import NO_OPTIONS, RequestOptions
from omnidraft.decode.external.sequence_tracker import ExternalSequence, SequenceTracker
from omnidraft.decode.logprobs import top_k_logprobs
from omnidraft.decode.sampling.noise import ForbiddenNoise
from omnidraft.decode.step_telemetry import count_step
from omnidraft.ports import DraftRequest, DraftTree, FinishReason, Metrics, Step, Timings, TreeLimits

_NO_NOISE = ForbiddenNoise()


OpenSequence = Callable[[np.ndarray, RequestOptions], ExternalSequence]
"""Returns a new sequence that begins with these ids and has these options, with the snapshot that it keeps."""

LogitsOf = Callable[[Sequence[int]], Sequence[torch.Tensor] | None]
"""Number of rows of each sequence of this round -> the logits [N, V] of each; None where they are not available."""

OptionsOf = Callable[[int], RequestOptions]


TRACE_ROWS = 256
"""Rows of a pass whose log-probabilities are recorded at most. The logits are copied: 0.6 MB per row for a vocabulary
of 150,000."""
IDLE_S = 5.0
"""After this time without a pass, the unrecorded rest of the last sequences is recorded: nobody else would do it."""


class RoundScheduler:
    """Drafts round by round. One thread at a time."""

    def __init__(
        self,
        open_sequence: OpenSequence,
        tracker: SequenceTracker,
        update_pass: Callable[[int, float], None],
        memory: DrafterMemory,
        metrics: Metrics,
        *,
        target: str,
        stop_ids: frozenset[int],
        top_k: int,
        num_tokens: Callable[[str | None], int],
        failures: DraftingFailures,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Draft at most `num_tokens` tokens for a sequence of a tenant, as it is asked in each round; None is the
        deployment's tenant."""
        self._open_sequence = open_sequence
        self._tracker = tracker
        self._update_pass = update_pass
        self._memory = memory
        self._metrics = metrics
        self._target = target
        self._stop_ids = stop_ids
        self._top_k = top_k
        self._num_tokens = num_tokens
        self._failures = failures
        self._clock = clock
        self._must_forget = Event()
        self._last_round: tuple[frozenset[ExternalSequence], float] | None = None
        """The sequences of the last round, and when it ended."""

    def next(
        self,
        emitted: Sequence[Sequence[int]],
        ids_of: Callable[[int], np.ndarray],
        logits_of: LogitsOf,
        options_of: OptionsOf = lambda index: NO_OPTIONS,
    ) -> list[list[int]]:
        """Return draft tokens per sequence, given the tokens that the engine emitted; none while it reads a prompt.

        Args:
            ids_of: index of a sequence -> all its ids, those just emitted included.
            options_of: index of a sequence -> what its request says about its drafting.
        """
        throttle.note_round()
        now_s = self._clock()
        try:
            self._forget()
            seqs = self._match(emitted, ids_of, options_of)
            active = [seq for seq in seqs if seq is not None]
            self._observe(seqs, emitted, self._update_costs(seqs, now_s), logits_of)
            self._end_records(self._tracker.set_active(active))
            self._evict()
            self._draft(active)
            return [[] if seq is None else list(seq.tree.tokens[1:]) for seq in seqs]
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._reset(exc)
            return [[] for _ in emitted]

    def tick(self) -> None:
        """End and evict inactive sequences, also when no round comes; called about every second."""
        try:
            self._forget()
            if self._last_round is None or self._clock() - self._last_round[1] > IDLE_S:
                self._last_round = None
                self._end_records(self._tracker.set_active(()))
            self._evict()
            if self._last_round is None and not len(self._tracker):
                self._memory.evict_all()
            self._metrics.set("omnidraft_followed_texts", len(self._tracker), target=self._target)
            self._metrics.set("omnidraft_drafter_ids", self._memory.num_ids, target=self._target)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._reset(exc)

    def forget_texts(self) -> None:
        """Drop the drafter's keys of all ended texts before the next round or tick; running ones will leave none. Any
        thread may call this."""
        self._must_forget.set()

    def _forget(self) -> None:
        if self._must_forget.is_set():
            self._must_forget.clear()
            self._memory.forget()

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
            seq.drafting.reset()

    def _match(
        self, emitted: Sequence[Sequence[int]], ids_of: Callable[[int], np.ndarray], options_of: OptionsOf
    ) -> list[ExternalSequence | None]:
        """Return the sequence at each index; None where nothing was emitted."""
        matches: list[ExternalSequence | None] = []
        for index, new_ids in enumerate(emitted):
            if not new_ids:
                matches.append(None)
                continue
            ids = ids_of(index)
            before = ids[: len(ids) - len(new_ids)]
            options = options_of(index)
            seq = self._tracker.find(before, matches, options)
            matches.append(self._open(before, options) if seq is None else seq)
        return matches

    def _open(self, prompt_ids: np.ndarray, options: RequestOptions) -> ExternalSequence | None:
        """Return a new sequence; None, until the next round, where it cannot be opened."""
        try:
            seq = self._open_sequence(prompt_ids, options)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._failures.report(exc)
            return None
        self._tracker.add(seq)
        return seq

    def _update_costs(self, seqs: Sequence[ExternalSequence | None], now_s: float) -> float:
        """Update the costs with the pass since the last round; return its seconds, 0 when it is no sample because it
        also read prompts or the engine waited."""
        last, self._last_round = self._last_round, None
        if last is None or last[0] != set(seqs):
            return 0.0
        pass_s = now_s - last[1]
        self._update_pass(sum(len(seq.tree) for seq in last[0]), pass_s)
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
        is_traced = is_traced and sum(num_rows) <= TRACE_ROWS
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
            seq.drafting.observe(new_ids)
            self._tracker.append(seq, new_ids)

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
        return Step(seq.tree, tuple(ids), tuple(path), "", None, Timings(seq.tree.draft_s, pass_s), traced)

    def _end_records(self, inactive: Sequence[ExternalSequence]) -> None:
        for seq in inactive:
            seq.tree = DraftTree.empty(seq.drafting.root)
            is_over = int(seq.tokens.ids[-1]) in self._stop_ids
            if seq.record_builder is not None:
                seq.record_builder.flush(FinishReason.STOP if is_over else None)
            if is_over:
                seq.drafting.close()
                self._tracker.remove(seq)
            else:
                seq.drafting.pause()

    def _evict(self) -> None:
        for seq in self._tracker.evict():
            seq.drafting.close()

    def _draft(self, active: Sequence[ExternalSequence]) -> None:
        """Draft for these sequences, which the engine scores next."""
        if not active:
            return
        requests = [DraftRequest(seq.drafting, len(seq.tokens), self._tree_limits(seq), _NO_NOISE) for seq in active]
        for seq, tree in zip(active, propose_all(requests), strict=True):
            seq.tree = tree
        self._last_round = frozenset(active), self._clock()

    def _tree_limits(self, seq: ExternalSequence) -> TreeLimits:
        num_tokens, wanted = self._num_tokens(seq.options.tenant), seq.options.num_draft_tokens
        num_tokens = num_tokens if wanted is None else min(num_tokens, wanted)
        return TreeLimits(num_tokens, num_chains=1, depth=num_tokens)
