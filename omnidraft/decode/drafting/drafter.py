"""What a small model with another vocabulary would say next: a chain, its runners-up, and branches that pay.

The drafter goes on from the places that the policy finds worth a step, several in one. A merge spells the draft tokens
before it as one target token, so the draft text is a tree in the drafter's tokens and another in the target's.
Shapes: D the drafter's vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TypeVar

import torch

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.drafter_context import DrafterContext
from omnidraft.decode.drafting.noise_coupling import NoiseCoupling
from omnidraft.decode.drafting.ranking import CandidateRanker
from omnidraft.decode.drafting.token_mapping import DraftPosition, TokenMapper
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import AcceptanceFn, DraftModel, Noise, Policy, Request, TreeLimits
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Drafter:
    """One snapshot's weights and cache, and what is known of how often they are right."""

    model: DraftModel
    tokenizer: Tokenizer
    target_vocabulary: Vocabulary
    alignment: Alignment
    cache: NgramCache
    weights: NoiseCoupling
    step_s: CostCurve | None = None
    """Told what each step took; None: nobody wants to know."""

    def context(self, request: Request) -> DrafterContext:
        """How this drafter reads the text of a request."""
        return DrafterContext(
            request,
            self.tokenizer,
            self.target_vocabulary,
            self.alignment,
            self.cache,
            limit=self.model.context_limit,
        )

    def open(self, request: Request, table: AcceptanceCalibrator, policy: Policy) -> "DrafterSession":
        """See tree.Contributor."""
        return DrafterSession(self, request, table, policy)


class DrafterSession:
    """Implements tree.DraftSourceSession."""

    def __init__(self, drafter: Drafter, request: Request, table: AcceptanceCalibrator, policy: Policy) -> None:
        self._drafter = drafter
        self._policy = policy
        self._temperature = request.sampling.temperature
        self._stop_ids = request.stop_ids
        self._readings = TokenMapper(drafter.alignment, drafter.cache, table)
        self.context = drafter.context(request)
        self._model = drafter.model.open()
        self._fed: list[int] = []
        self._read_to = 0
        """Ids of the target's text that were fed."""
        self._firsts: dict[int, list[int | None]] = {}

    def extend(self, tree: DraftTreeBuilder, position: int, limits: TreeLimits, noise: Noise) -> None:
        """See tree.DraftSourceSession."""
        self._firsts = {}
        if not limits.num_nodes or not self._policy.should_draft(position - self._read_to):
            return
        ids = self.context.ids
        if ids is None or not self._reads_again(ids, position):
            return
        if not self._policy.select_expansions([tree.open_value(0)], tree.num_drafted):
            return
        self._read_to = position
        logits_D = self._advance(tree, ids)
        (odds,) = self._acceptance_probabilities(1)
        open_places = self._expand(tree, DraftPosition(odds=odds), logits_D, position, noise)
        num_branched = 0
        while chosen := self._chosen(tree, open_places, limits, num_branched):
            logits_RD = self._branch(tree, chosen)
            open_places = [place for place in open_places if place not in chosen]
            for place, logits_D, odds in zip(
                chosen, logits_RD, self._acceptance_probabilities(len(chosen)), strict=True
            ):
                fed = replace(place, row=num_branched, odds=odds)
                num_branched += 1
                open_places += self._expand(tree, fed, logits_D, position, noise)

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """See tree.DraftSourceSession."""
        for node, token in reached:
            if node in self._firsts:
                self._drafter.weights.update(self._temperature, self._firsts[node], token)
        self.context.observe(emitted)

    def _reads_again(self, ids: list[int], position: int) -> bool:
        """Whether what the drafter has to read of a text that it followed so far pays: half a window where it slid."""
        num_missed = len(ids) - self._num_kept(ids)
        return not self._fed or num_missed <= position - self._read_to or self._policy.should_draft(num_missed)

    def _chosen(
        self, tree: DraftTreeBuilder, places: Sequence[DraftPosition], limits: TreeLimits, num_branched: int
    ) -> list[DraftPosition]:
        """The places to go on from in the next step; none when drafting is over. Every id branched in this round has
        its place in the drafter's context, also beside others."""
        room = self._drafter.model.context_limit - len(self._fed) - num_branched
        values = {place: sum(map(tree.open_value, place.ends)) for place in places}
        best = sorted((place for place, value in values.items() if value), key=lambda place: -values[place])
        if not best or not room or self._is_full(tree, limits):
            return []
        return best[: min(self._policy.select_expansions([values[place] for place in best], tree.num_drafted), room)]

    def _is_full(self, tree: DraftTreeBuilder, limits: TreeLimits) -> bool:
        """Whether what fits is drafted already."""
        if self._policy.num_candidates > 1 and limits.num_chains is None:
            return tree.num_drafted >= 4 * limits.num_nodes
        return len(tree.ranked(limits)) >= limits.num_nodes

    def _expand(
        self, tree: DraftTreeBuilder, place: DraftPosition, logits_D: torch.Tensor, position: int, noise: Noise
    ) -> list[DraftPosition]:
        """Add what the drafter would say here; returns the new places that may be gone on from."""
        weights, end = self._drafter.weights, max(place.ends, key=tree.value)
        ranking = CandidateRanker(logits_D, self._drafter.alignment, self._temperature)
        weight, at = weights.best(self._temperature), position + tree.nodes[end].depth
        tree.noise_weight = weight if self._temperature else 0.0
        if self._temperature:
            self._firsts[end] = ranking.firsts(weights.weights, noise, at)
        places = []
        for rank, candidate in enumerate(ranking.best(self._policy.num_candidates, weight, noise, at)):
            style = (round(self._temperature, 1), tree.noise_weight)
            behind = self._readings.add(tree, place, candidate, rank, style)
            if rank == 0:
                tree.draft_ids = max(tree.draft_ids, behind.draft_ids, key=len)
            going_on = tuple(node for node in behind.ends if tree.nodes[node].token not in self._stop_ids)
            if going_on:
                places.append(replace(behind, ends=going_on))
        return places

    def _advance(self, tree: DraftTreeBuilder, ids: list[int]) -> torch.Tensor:
        """The drafter's logits after the text. [D]"""
        keep = self._num_kept(ids)
        self._fed = list(ids)
        return self._timed(tree, len(ids) - keep, lambda: self._model.advance(keep, ids[keep:]))

    def _num_kept(self, ids: list[int]) -> int:
        """Leading ids whose keys are there; the last one is always read again."""
        limit = min(len(self._fed), len(ids) - 1)
        if self._fed[:limit] == ids[:limit]:
            return limit
        return next(at for at in range(limit) if self._fed[at] != ids[at])

    def _branch(self, tree: DraftTreeBuilder, places: Sequence[DraftPosition]) -> torch.Tensor:
        """... and after each of these places. [R, D]"""
        ids = [place.draft_id for place in places if place.draft_id is not None]
        rows = [place.before.row for place in places if place.before is not None]
        parents = [-1 if row is None else row for row in rows]
        return self._timed(tree, len(ids), lambda: self._model.branch(ids, parents))

    def _acceptance_probabilities(self, num_rows: int) -> Sequence[AcceptanceFn | None]:
        """Of each row of the last step; None where chances are measured agreement."""
        found = self._model.acceptance_probabilities() if self._policy.uses_acceptance_head else None
        return list(repeat(None, num_rows)) if found is None else found

    def _timed(self, tree: DraftTreeBuilder, num_rows: int, compute: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        result = compute()
        spent = time.perf_counter() - started
        tree.draft_s += spent
        tree.step_rows.append(num_rows)
        if self._drafter.step_s is not None and num_rows <= 4:
            self._drafter.step_s.update(num_rows, spent)
        return result
