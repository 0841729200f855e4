"""Drafting with a small model that has another vocabulary: a chain, its runners-up, and branches that pay.

Each step extends the prefixes that the policy selects, several at once. A merge reads the last draft tokens as one
target token, so the draft text is a tree in the drafter's tokens and another in the target's.
Shapes: D the drafter's vocabulary, R rows of a step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TypeVar

import torch

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, NoiseCoupling
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.drafter_context import DrafterContext
from omnidraft.decode.drafting.ranking import CandidateRanker
from omnidraft.decode.drafting.token_mapping import DraftPrefix, TokenMapper
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import AcceptanceFn, DraftModel, Noise, Policy, Request, TreeLimits
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Drafter:
    """Implements tree_proposer.DraftSource: one snapshot's weights and n-gram cache, and the noise weight that fits
    them."""

    model: DraftModel
    tokenizer: Tokenizer
    target_vocabulary: Vocabulary
    alignment: Alignment
    cache: NgramCache
    noise_coupling: NoiseCoupling
    step_s: CostCurve | None = None
    """Updated with the duration of each step; None measures nothing."""

    def context(self, request: Request) -> DrafterContext:
        """Return the drafter's view of a request's text."""
        return DrafterContext(
            request,
            self.tokenizer,
            self.target_vocabulary,
            self.alignment,
            self.cache,
            limit=self.model.context_limit,
        )

    def open(self, request: Request, calibrator: AcceptanceCalibrator, policy: Policy) -> "DrafterSession":
        """See tree_proposer.DraftSource."""
        return DrafterSession(self, request, calibrator, policy)


class DrafterSession:
    """Implements tree_proposer.DraftSourceSession."""

    def __init__(self, drafter: Drafter, request: Request, calibrator: AcceptanceCalibrator, policy: Policy) -> None:
        self._drafter = drafter
        self._policy = policy
        self._temperature = request.sampling.temperature
        self._stop_ids = request.stop_ids
        self._mapper = TokenMapper(drafter.alignment, drafter.cache, calibrator)
        self.context = drafter.context(request)
        self._model = drafter.model.open()
        self._fed: list[int] = []
        self._read_to = 0
        """Ids of the target's text that the drafter has read."""
        self._first_ids: dict[int, list[int | None]] = {}

    def extend(self, tree: DraftTreeBuilder, position: int, limits: TreeLimits, noise: Noise) -> None:
        """See tree_proposer.DraftSourceSession."""
        self._first_ids = {}
        if not limits.num_nodes or not self._policy.should_draft(position - self._read_to):
            return
        ids = self.context.ids
        if ids is None or not self._rereading_pays(ids, position):
            return
        if not self._policy.select_expansions([tree.open_value(0)], tree.num_drafted):
            return
        self._read_to = position
        logits_D = self._advance(tree, ids)
        (acceptance,) = self._acceptance_probabilities(1)
        open_prefixes = self._expand(tree, DraftPrefix(acceptance=acceptance), logits_D, position, noise)
        num_branched = 0
        while selected := self._select(tree, open_prefixes, limits, num_branched):
            logits_RD = self._branch(tree, selected)
            open_prefixes = [prefix for prefix in open_prefixes if prefix not in selected]
            head_R = self._acceptance_probabilities(len(selected))
            for prefix, logits_D, acceptance in zip(selected, logits_RD, head_R, strict=True):
                branched = replace(prefix, row=num_branched, acceptance=acceptance)
                num_branched += 1
                open_prefixes += self._expand(tree, branched, logits_D, position, noise)

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """See tree_proposer.DraftSourceSession."""
        for node, token in reached:
            if node in self._first_ids:
                self._drafter.noise_coupling.update(self._temperature, self._first_ids[node], token)
        self.context.observe(emitted)

    def _rereading_pays(self, ids: list[int], position: int) -> bool:
        """Return whether reading what the drafter has to read again is worth it: half a window after the window
        slid."""
        num_missed = len(ids) - self._num_cached(ids)
        return not self._fed or num_missed <= position - self._read_to or self._policy.should_draft(num_missed)

    def _select(
        self, tree: DraftTreeBuilder, prefixes: Sequence[DraftPrefix], limits: TreeLimits, num_branched: int
    ) -> list[DraftPrefix]:
        """Return the prefixes that the next step extends; none when drafting is over. Every id branched in this round
        takes a position in the drafter's context, also beside others."""
        num_free = self._drafter.model.context_limit - len(self._fed) - num_branched
        values = {prefix: sum(map(tree.open_value, prefix.ends)) for prefix in prefixes}
        best = sorted((prefix for prefix, value in values.items() if value), key=lambda prefix: -values[prefix])
        if not best or not num_free or self._is_full(tree, limits):
            return []
        num_selected = self._policy.select_expansions([values[prefix] for prefix in best], tree.num_drafted)
        return best[: min(num_selected, num_free)]

    def _is_full(self, tree: DraftTreeBuilder, limits: TreeLimits) -> bool:
        """Return whether the tree holds as many nodes as can be scored."""
        if self._policy.num_candidates > 1 and limits.num_chains is None:
            return tree.num_drafted >= 4 * limits.num_nodes
        return len(tree.ranked(limits)) >= limits.num_nodes

    def _expand(
        self, tree: DraftTreeBuilder, prefix: DraftPrefix, logits_D: torch.Tensor, position: int, noise: Noise
    ) -> list[DraftPrefix]:
        """Add the drafter's candidates after this prefix; return the new prefixes that may be extended."""
        coupling, end = self._drafter.noise_coupling, max(prefix.ends, key=tree.value)
        ranker = CandidateRanker(logits_D, self._drafter.alignment, self._temperature)
        weight, at = coupling.best(self._temperature), position + tree.nodes[end].depth
        tree.noise_weight = weight if self._temperature else 0.0
        if self._temperature:
            self._first_ids[end] = ranker.first_ids(coupling.weights, noise, at)
        prefixes = []
        for rank, candidate in enumerate(ranker.best(self._policy.num_candidates, weight, noise, at)):
            style = (round(self._temperature, 1), tree.noise_weight)
            next_prefix = self._mapper.add(tree, prefix, candidate, rank, style)
            if rank == 0:
                tree.draft_ids = max(tree.draft_ids, next_prefix.draft_ids, key=len)
            ends = tuple(node for node in next_prefix.ends if tree.nodes[node].token not in self._stop_ids)
            if ends:
                prefixes.append(replace(next_prefix, ends=ends))
        return prefixes

    def _advance(self, tree: DraftTreeBuilder, ids: list[int]) -> torch.Tensor:
        """Return the drafter's logits after the text. [D]"""
        keep = self._num_cached(ids)
        self._fed = list(ids)
        return self._timed(tree, len(ids) - keep, lambda: self._model.advance(keep, ids[keep:]))

    def _num_cached(self, ids: list[int]) -> int:
        """Return the number of leading ids whose keys are cached; the last id is always read again."""
        limit = min(len(self._fed), len(ids) - 1)
        if self._fed[:limit] == ids[:limit]:
            return limit
        return next(at for at in range(limit) if self._fed[at] != ids[at])

    def _branch(self, tree: DraftTreeBuilder, prefixes: Sequence[DraftPrefix]) -> torch.Tensor:
        """Return the drafter's logits after each of these prefixes. [R, D]"""
        ids = [prefix.draft_id for prefix in prefixes if prefix.draft_id is not None]
        rows = [prefix.before.row for prefix in prefixes if prefix.before is not None]
        parents = [-1 if row is None else row for row in rows]
        return self._timed(tree, len(ids), lambda: self._model.branch(ids, parents))

    def _acceptance_probabilities(self, num_rows: int) -> Sequence[AcceptanceFn | None]:
        """Return the acceptance head's function of each row of the last step; None where the policy uses measured
        agreement."""
        acceptance = self._model.acceptance_probabilities() if self._policy.uses_acceptance_head else None
        return list(repeat(None, num_rows)) if acceptance is None else acceptance

    def _timed(self, tree: DraftTreeBuilder, num_rows: int, compute: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        result = compute()
        spent = time.perf_counter() - started
        tree.draft_s += spent
        tree.step_rows.append(num_rows)
        if self._drafter.step_s is not None and num_rows <= 4:
            self._drafter.step_s.update(num_rows, spent)
        return result
