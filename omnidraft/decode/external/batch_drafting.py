"""Chains for several sequences at once: one step of the drafter extends every prefix, of all of them, that pays.

Like drafting/drafter.py, with one decision of the policy for all sequences together. It uses no noise and no
temperature: an engine that draws with its own noise accepts a token with the target's probability of it, so the most
probable token is best.
Shapes: D the drafter's vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.prompt_lookup import PromptLookupSession
from omnidraft.decode.drafting.ranking import CandidateRanker
from omnidraft.decode.drafting.token_mapping import DraftPrefix, TokenMapper
from omnidraft.decode.external.batch_policy import BatchPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.decode.sampling.noise import ForbiddenNoise
from omnidraft.ports import DraftSession, DraftTree, Request, TreeLimits

_STYLE = (0.0, 0.0)
"""Temperature and noise weight that acceptance is counted by."""
_NO_NOISE = ForbiddenNoise()


class DraftingState:
    """One snapshot's drafting state of one sequence."""

    def __init__(
        self,
        drafter: Drafter,
        request: Request,
        prompt_tail_ids: Sequence[int],
        calibrator: AcceptanceCalibrator,
        *,
        with_lookup: bool,
    ) -> None:
        """Begin at the end of the prompt.

        Args:
            request: its drafter's prompt ids end before `prompt_tail_ids`, its prompt ids after them.
            prompt_tail_ids: target ids at the end of the prompt, which the answer continues.
        """
        self.drafter = drafter
        self.calibrator = calibrator
        self.stop_ids = request.stop_ids
        self.context = drafter.context(request)
        self.context.observe(prompt_tail_ids)
        self.mapper = TokenMapper(drafter.alignment, drafter.cache, calibrator)
        self.lookup = PromptLookupSession(request.prompt_ids, calibrator) if with_lookup else None
        self.model: DraftSession | None = None
        """None until the sequence is drafted for, and while its KV cache was released."""
        self.fed: list[int] = []
        self.root = request.prompt_ids[-1]
        self.tree: DraftTreeBuilder | None = None
        self.num_branched = 0

    def release(self) -> None:
        """Free the drafter's KV cache; it is computed again when the sequence is drafted for again."""
        self.model, self.fed = None, []

    def num_missed(self, ids: Sequence[int]) -> int:
        """Return the number of draft ids that the drafter has to read."""
        return len(ids) - self.common(ids)

    def common(self, ids: Sequence[int]) -> int:
        """Return the number of leading ids that were read; the last one is always read again."""
        limit = min(len(self.fed), len(ids) - 1)
        if self.fed[:limit] == ids[:limit]:
            return limit
        return next(at for at in range(limit) if self.fed[at] != ids[at])

    def observe(self, emitted: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Append emitted ids; return the nodes that they passed through, each with the id that came next."""
        reached = self.tree.follow(emitted) if self.tree is not None else []
        for node, token in reached:
            assert self.tree is not None
            for child in self.tree.children(node):
                if child.estimated_from is not None:
                    kind, q = child.estimated_from
                    self.calibrator.update(kind, q, child.depth, is_right=child.token == token)
        self.context.observe(emitted)
        if self.lookup is not None:
            self.lookup.observe(emitted, reached)
        self.root, self.tree = emitted[-1], None
        return reached


@dataclass(slots=True)
class BatchDraft:
    """The chains of one round, and the drafter's steps for them."""

    trees: list[DraftTree] = field(default_factory=list)
    step_rows: list[int] = field(default_factory=list)
    draft_s: float = 0.0


def draft_batch(
    seqs: Sequence[DraftingState],
    num_tokens: int,
    policy: BatchPolicy,
    step_s: CostCurve | None,
    *,
    may_open: Callable[[int], bool],
) -> BatchDraft:
    """Return a chain of at most `num_tokens` for each of these sequences, which have one snapshot.

    Args:
        step_s: updated with the duration of each step; None measures nothing.
        may_open: whether there is memory for the keys of so many more ids.
    """
    batch_draft, limits = BatchDraft(), TreeLimits(num_tokens, num_chains=1, depth=num_tokens)
    for seq in seqs:
        seq.tree, seq.num_branched = DraftTreeBuilder(seq.root, num_tokens), 0
        if seq.lookup is not None:
            seq.lookup.extend(seq.tree, 0, limits, _NO_NOISE)
    if num_tokens:
        _DraftSteps(batch_draft, limits, policy, step_s).run(_readers(seqs, policy, may_open))
    batch_draft.trees = _prune([seq.tree for seq in seqs if seq.tree is not None], limits, policy)
    return batch_draft


def _readers(
    seqs: Sequence[DraftingState], policy: BatchPolicy, may_open: Callable[[int], bool]
) -> list[tuple[DraftingState, list[int]]]:
    """Return the sequences that the drafter is to draft for, with all their draft ids."""
    readers = []
    for seq in seqs:
        ids = seq.context.ids
        if ids is None or not policy.should_draft(seq.num_missed(ids)):
            continue
        if seq.model is None:
            if not may_open(len(ids)):
                continue
            seq.model = seq.drafter.model.open()
        readers.append((seq, ids))
    return readers


class _DraftSteps:
    """The drafter's steps of one round."""

    def __init__(
        self, batch_draft: BatchDraft, limits: TreeLimits, policy: BatchPolicy, step_s: CostCurve | None
    ) -> None:
        self._batch_draft = batch_draft
        self._limits = limits
        self._policy = policy
        self._step_s = step_s

    def run(self, readers: Sequence[tuple[DraftingState, list[int]]]) -> None:
        """Step until no further step pays."""
        at_root = [(seq, DraftPrefix()) for seq, _ in readers]
        chosen = {id(seq) for seq, _ in self._select(at_root)}
        readers = [(seq, ids) for seq, ids in readers if id(seq) in chosen]
        if not readers:
            return
        logits = self._advance(readers)
        prefixes = [(seq, _expand(seq, DraftPrefix(), each)) for (seq, _), each in zip(readers, logits, strict=True)]
        while selected := self._select([(seq, prefix) for seq, prefix in prefixes if self._is_open(seq, prefix)]):
            logits = self._branch(selected)
            prefixes = []
            for (seq, prefix), each in zip(selected, logits, strict=True):
                row, seq.num_branched = seq.num_branched, seq.num_branched + 1
                prefixes.append((seq, _expand(seq, replace(prefix, row=row), each)))

    def _is_open(self, seq: DraftingState, prefix: DraftPrefix) -> bool:
        """Return whether a token after it fits the drafter's context and the chain."""
        assert seq.tree is not None
        fits_context = len(seq.fed) + len(prefix.draft_ids) <= seq.drafter.model.context_limit
        return fits_context and any(seq.tree.nodes[end].depth < self._limits.num_nodes for end in prefix.ends)

    def _select(self, prefixes: Sequence[tuple[DraftingState, DraftPrefix]]) -> list[tuple[DraftingState, DraftPrefix]]:
        """Return the prefixes that the policy extends, best first."""
        values = [_value(seq, prefix) for seq, prefix in prefixes]
        order = sorted((at for at, value in enumerate(values) if value), key=lambda at: -values[at])
        if not order:
            return []
        num_nodes = sum(min(seq.tree.num_drafted, self._limits.num_nodes) for seq, _ in prefixes if seq.tree)
        return [prefixes[at] for at in order[: self._policy.select_expansions([values[at] for at in order], num_nodes)]]

    def _advance(self, readers: Sequence[tuple[DraftingState, list[int]]]) -> Sequence[torch.Tensor]:
        requests = []
        for seq, ids in readers:
            keep = seq.common(ids)
            seq.fed = list(ids)
            assert seq.model is not None
            requests.append((seq.model, keep, ids[keep:]))
        model = readers[0][0].drafter.model
        return self._timed(sum(len(ids) for *_, ids in requests), lambda: model.advance_all(requests))

    def _branch(self, selected: Sequence[tuple[DraftingState, DraftPrefix]]) -> list[torch.Tensor]:
        requests = []
        for seq, prefix in selected:
            assert seq.model is not None
            assert prefix.draft_id is not None
            assert prefix.before is not None
            parent = -1 if prefix.before.row is None else prefix.before.row
            requests.append((seq.model, [prefix.draft_id], [parent]))
        model = selected[0][0].drafter.model
        return [rows[0] for rows in self._timed(len(requests), lambda: model.branch_all(requests))]

    def _timed(self, num_rows: int, compute: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        started = time.perf_counter()
        result = compute()
        spent = time.perf_counter() - started
        self._batch_draft.draft_s += spent
        self._batch_draft.step_rows.append(num_rows)
        if self._step_s is not None and num_rows <= 16:
            self._step_s.update(num_rows, spent)
        return result


def _value(seq: DraftingState, prefix: DraftPrefix) -> float:
    """Return the probability that the text reaches this prefix and continues with a token that is not drafted yet."""
    assert seq.tree is not None
    return sum(map(seq.tree.open_value, prefix.ends))


def _expand(seq: DraftingState, prefix: DraftPrefix, logits_D: torch.Tensor) -> DraftPrefix:
    """Add the drafter's best candidate; return the prefix after it, without ends where drafting cannot continue."""
    assert seq.tree is not None
    candidates = CandidateRanker(logits_D, seq.drafter.alignment, _STYLE[0]).best(1, _STYLE[1], _NO_NOISE, 0)
    if not candidates:
        return DraftPrefix(before=prefix, ends=())
    seq.tree.noise_weight = 0.0
    next_prefix = seq.mapper.add(seq.tree, prefix, candidates[0], 0, _STYLE)
    seq.tree.draft_ids = max(seq.tree.draft_ids, next_prefix.draft_ids, key=len)
    return replace(
        next_prefix, ends=tuple(end for end in next_prefix.ends if seq.tree.nodes[end].token not in seq.stop_ids)
    )


def _prune(trees: Sequence[DraftTreeBuilder], limits: TreeLimits, policy: BatchPolicy) -> list[DraftTree]:
    """Return the best chain of each tree, as long as it pays beside the others."""
    chains = [tree.ranked(limits) for tree in trees]
    nodes = [(trees[at].value(node), at) for at, chain in enumerate(chains) for node in chain]
    nodes.sort(key=lambda node: -node[0])  # stable: a chain's values never rise, so its nodes stay in order
    lengths = [0] * len(trees)
    for _, at in nodes[: policy.prune([value for value, _ in nodes])]:
        lengths[at] += 1
    return [tree.build(chain[:length]) for tree, chain, length in zip(trees, chains, lengths, strict=True)]
