"""One text that a drafter with another vocabulary drafts for: what it has read, and the candidates after a prefix.

A merge reads the last draft tokens as one target token, so the draft text is a tree in the drafter's tokens and another
in the target's.
Shapes: D the drafter's vocabulary.
"""

import math
from collections.abc import Hashable, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from omnidraft.decode.common_prefix import common_prefix
from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, temperature_bin
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.forced_tokens import ForcedPrefixes, ForcedRuns
from omnidraft.decode.drafting.loaded_factors import OpenSession
from omnidraft.decode.drafting.ranking import CandidateRanker
from omnidraft.decode.drafting.token_mapping import AFTER_TEXT, DraftPrefix, TokenMapper
from omnidraft.errors import ModelError
from omnidraft.ports import DraftSession, Request, RoundPlan

if TYPE_CHECKING:
    from omnidraft.decode.drafting.drafter import Drafter

MAX_ROWS = 4
"""Prefixes of one text that a step extends at most."""
LAST_IDS = 64
"""Ids at the end of a text that the drafter reads where the whole is not worth reading. With 64 or 128 of 700 ids it
agrees in 63 % of places, with all in 75 % (SmolLM2-135M, facts of an article as JSON)."""


class DrafterSession:
    """Implements tree_proposer.DraftSourceSession."""

    draft: DraftTreeBuilder
    """The tree of this round."""
    ids: list[int]
    """The ids that the drafter reads before it drafts: those of the text, without its last one where that heals, and
    what is forced after it."""
    start: DraftPrefix
    """The prefix that these ids end with."""
    _plan: RoundPlan

    def __init__(self, drafter: "Drafter", request: Request, calibrator: AcceptanceCalibrator) -> None:
        self.context = drafter.context(request)
        self._drafter, self._request = drafter, request
        self._mapper = TokenMapper(drafter.alignment, drafter.cache, calibrator, drafter.healing)
        self._forced = ForcedPrefixes(drafter.tokenizer, drafter.target_vocabulary, ForcedRuns(request, calibrator))
        self.model: DraftSession | None = None
        """None until the text is drafted for, and again after `close` and `reset`."""
        self.fed: list[int] = []
        """The ids whose keys the model's session holds."""
        self._read_to = 0
        """Ids of the target's text that the drafter has read."""
        self._first_ids: dict[int, list[int | None]] = {}
        """The first candidate of each noise weight after the nodes of the last tree."""
        self._cache_scope = request.tenant if request.cache_scope is None else request.cache_scope
        self._keys_scope: Hashable = None
        """The scope of the texts that may reuse the keys in the model's session."""
        self._may_resume = True
        self._is_blocked = False
        """Whether the plan would have drafted for the text last time, and could not."""
        self._num_forgotten = drafter.pool.memory.num_forgotten
        self._prefixes: list[DraftPrefix] = []
        """Those that may be extended in this round."""
        self._num_branched = self._num_before = 0
        """Ids that were branched in this round, and nodes that the tree held before it."""

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """See tree_proposer.DraftSourceSession."""
        temperature, work = self._request.sampling.temperature, self._request.work
        for node, token in reached:
            if node in self._first_ids:
                self._drafter.noise_coupling.update(temperature, self._first_ids[node], token, work)
        self.context.observe(emitted)

    def reset(self) -> None:
        """See tree_proposer.DraftSourceSession."""
        self._drafter.pool.memory.release(self, self._drafter.pool)
        self.model, self.fed, self._first_ids, self._read_to = None, [], {}, 0

    def close(self) -> None:
        """See tree_proposer.DraftSourceSession."""
        model, fed = self.model, self.fed
        self.reset()
        self._may_resume = True
        is_forgotten = self._request.is_forgotten or self._num_forgotten != self._drafter.pool.memory.num_forgotten
        if model is not None and fed and not is_forgotten:
            self._drafter.pool.put(self._keys_scope, model, fed)

    def begin_round(self, draft: DraftTreeBuilder, plan: RoundPlan) -> bool:
        """Return whether the drafter drafts for the text in this round. Under constraints no line break heals, since
        what they allow is known for whole target tokens only."""
        self.draft, self._plan, self._first_ids = draft, plan, {}
        if (ids := self._ids_to_read()) is None:
            return False
        self._prefixes, self._num_branched, self._num_before = [], 0, draft.num_drafted
        healing = self._drafter.healing
        heals = healing is not None and draft.constraints is None and healing.is_due(ids)
        start = self._forced.behind(draft, DraftPrefix(row=AFTER_TEXT, heals=heals))
        if start is None:
            return False
        for prefix in start.unbranched():
            prefix.row = AFTER_TEXT
        self.start, self.ids = start, [*ids[: len(ids) - heals], *start.draft_ids]
        return len(self.ids) <= self._drafter.model.context_limit

    def read(self) -> tuple[DraftSession, int, list[int]]:
        """Return the arguments of `prefill_or_extend` that take the drafter to the end of its ids; `count_read` comes
        after it. Where an exception gets out of it instead, no keys count but those that were there."""
        if self.model is None:
            opener = self._own_opener()
            self.model, self._keys_scope = (opener or self._drafter.model.open)(), self._scope(opener)
        keep = len(self.ids) - self.num_missed(self.ids)
        self.fed = self.ids[:keep]
        self._drafter.pool.memory.hold(self)
        return self.model, keep, self.ids[keep:]

    def count_read(self, num_left: int = 0) -> None:
        """Count the keys of the ids as there, but those of the last `num_left`."""
        self.fed, self._read_to = self.ids[: len(self.ids) - num_left], max(self.draft.position - num_left, 0)

    def num_missed(self, ids: list[int]) -> int:
        """Return the number of ids without keys; the last id is always read again."""
        return len(ids) - min(common_prefix(self.fed, ids), len(ids) - 1)

    def _ids_to_read(self) -> list[int] | None:
        """Return the draft ids of the whole text, to draft from; None when nothing is drafted in this round."""
        if not self.draft.limits.num_nodes:
            return None
        if self._may_resume:
            self._resume()
        if self._is_blocked and not self._can_read():
            return None  # without asking the plan, which may try another text instead
        if not self._reading_pays():
            return None
        ids = self.context.ids
        num_missed = 0 if ids is None else self.num_missed(ids)
        if not self._rereading_pays(num_missed):
            return None
        can_read = ids is not None and (self._drafter.pool.memory.reserve(num_missed) or self.model is not None)
        self._is_blocked = not can_read
        return ids if can_read else None

    def _can_read(self) -> bool:
        """Return whether there is something to read, and room for its keys."""
        ids = self.context.ids
        return ids is not None and (self.model is not None or self._drafter.pool.memory.fits(self.num_missed(ids)))

    def _reading_pays(self) -> bool:
        """Return whether reading what the drafter has not read is worth it; where only its end is, skip to that."""
        index, num_ids = self.draft.index, self.draft.position - self._read_to
        reads_end = num_ids > LAST_IDS and not self._plan.should_read(index, num_ids, LAST_IDS)
        is_worth_it = self._plan.should_draft(index, LAST_IDS if reads_end else num_ids)
        if is_worth_it and reads_end:
            self.context.skip_to_end(LAST_IDS)
        return is_worth_it

    def _rereading_pays(self, num_missed: int) -> bool:
        """Return whether reading what the drafter has to read again is worth it: half a window after the window
        slid."""
        is_growth = not self.fed or num_missed <= self.draft.position - self._read_to
        return is_growth or self._plan.should_draft(self.draft.index, num_missed)

    def _resume(self) -> None:
        """Take over the keys of an ended text that began with the same ids."""
        self._may_resume = False
        if not self._drafter.pool.ended or (ids := self.context.ids) is None:
            return
        scope = self._scope(self._own_opener())
        ended = self._drafter.pool.take(scope, ids)
        if ended is not None:
            self.model, self.fed, self._keys_scope = ended.session, ended.fed, scope
            self._read_to = max(self.draft.position - self.num_missed(ids), 0)
            self._drafter.pool.memory.hold(self)

    def _own_opener(self) -> OpenSession | None:
        """Return what opens sessions with the tenant's own factors; None where it drafts with the shared weights."""
        return None if self._drafter.factors is None else self._drafter.factors.opener(self._request.tenant)

    def _scope(self, opener: OpenSession | None) -> Hashable:
        """Return whose texts may reuse keys of such a session, which depend on the factors that made them."""
        return self._cache_scope, None if opener is None else self._request.tenant

    def open_value(self, prefix: DraftPrefix) -> float:
        """Return the probability that the text reaches the prefix and continues with what is not drafted yet."""
        return prefix.share * sum(map(self.draft.open_value, prefix.ends))

    def best_prefixes(self) -> "list[ValuedPrefix]":
        """Return the prefixes that the next step may extend with their values, best first; none when the tree is full.
        Every id branched in this round takes a position in the drafter's context, also beside others."""
        if self._is_full():
            return []
        num_free = self._drafter.model.context_limit - len(self.fed) - self._num_branched
        valued = [(self.open_value(prefix), self, prefix) for prefix in self._prefixes]
        best = sorted([each for each in valued if each[0]], key=itemgetter(0), reverse=True)[:MAX_ROWS]
        num_ids = accumulate([len(prefix.unbranched()) for *_, prefix in best])
        return [each for each, needed in zip(best, num_ids, strict=True) if needed <= num_free]

    def branch(self, selected: Sequence[DraftPrefix]) -> tuple[DraftSession, list[int], list[int]]:
        """Return the arguments of `branch` that extend these prefixes: the ids that the drafter has not read, several
        for a prefix behind forced tokens."""
        assert self.model is not None
        self._prefixes = [prefix for prefix in self._prefixes if prefix not in selected]
        ids: list[int] = []
        parents: list[int] = []
        for prefix in chain.from_iterable(map(DraftPrefix.unbranched, selected)):
            assert prefix.draft_id is not None
            assert prefix.before is not None
            assert prefix.before.row is not None
            ids.append(prefix.draft_id)
            parents.append(prefix.before.row)
            prefix.row = self._num_branched
            self._num_branched += 1
        return self.model, ids, parents

    def expand_all(self, prefixes: Sequence[DraftPrefix], logits: np.ndarray) -> None:
        """Add the drafter's candidates after each of these prefixes, whose logits [R, D], or [D] of one, the last step
        computed. Raises ModelError where these are no numbers."""
        assert self.model is not None
        rows = logits.reshape(-1, logits.shape[-1])
        head = self.model.acceptance_probabilities() if self._plan.uses_acceptance_head else None
        for prefix in prefixes:
            assert prefix.row is not None
            row = prefix.row - self._num_branched  # counted from the end of the step's rows
            prefix.acceptance = None if head is None else head[row]
            if prefix.heals:
                self._expand_healed(prefix, rows[row])
            else:
                self._expand(prefix, rows[row], self._plan.num_candidates, prefix.share)

    def _expand_healed(self, prefix: DraftPrefix, logits_D: np.ndarray) -> None:
        """Add the tokens that begin with the line break at the end of the text; the break alone is a candidate too, of
        which a chain takes the likelier."""
        healing, num_candidates = self._drafter.healing, self._plan.num_candidates
        assert healing is not None
        logits, q = healing.divided(logits_D)
        _require_numbers(q)
        is_likely = q > 0.5
        self._expand(prefix, logits, num_candidates - is_likely, 1 - q)
        if is_likely or num_candidates > 1:
            self._add_prefix(DraftPrefix(prefix, healing.break_id, ends=prefix.ends, share=q))

    def _expand(self, prefix: DraftPrefix, logits_D: np.ndarray, num_candidates: int, share: float) -> None:
        """Add the drafter's candidates after this prefix, which have this share of what may follow, and the new
        prefixes that may be extended."""
        tree, sampling, coupling = self.draft, self._request.sampling, self._drafter.noise_coupling
        alignment, end = self._mapper.alignment_at(prefix), max(prefix.ends, key=tree.values().__getitem__)
        constraints, path = tree.constraints, list[int]()
        if constraints is not None:  # which may leave nothing of what are numbers
            _require_numbers(float(logits_D.max()))
            path = tree.tokens_to(end)
            logits_D = constraints.adjusted(logits_D, alignment, path)
        ranked = self._drafter.rank(logits_D, alignment)
        is_none_left = ranked.max_logit == -math.inf and (constraints is not None or prefix.heals)
        _require_numbers(0.0 if is_none_left else ranked.max_logit)
        ranker = CandidateRanker(ranked, alignment, sampling)
        weight = coupling.best(sampling.temperature, self._request.work) if sampling.temperature else 0.0
        tree.noise_weight, at = weight, tree.position + tree.nodes[end].depth
        if sampling.temperature and share >= 0.5:
            self._first_ids[end] = ranker.first_ids(coupling.weights, tree.noise, at)
        style = (temperature_bin(sampling.temperature), weight)
        for rank, each in enumerate(ranker.best(num_candidates, weight, tree.noise, at)):
            candidate = each if constraints is None else ranker.continued(each, constraints, path)
            next_prefix = self._mapper.add(tree, prefix, candidate.with_share(share), rank, style)
            if rank == 0:
                tree.draft_ids = max(tree.draft_ids, next_prefix.draft_ids, key=len)
            self._add_prefix(next_prefix)

    def _add_prefix(self, prefix: DraftPrefix) -> None:
        """Let the drafter extend the prefix, or the one behind what is forced after it, unless the text ends there."""
        tree, stop_ids = self.draft, self._request.stop_ids
        prefix.ends = tuple(node for node in prefix.ends if tree.nodes[node].token not in stop_ids)
        behind = self._forced.behind(tree, prefix) if prefix.ends else None
        if behind is not None:
            self._prefixes.append(behind)

    def _is_full(self) -> bool:
        """Return whether the tree holds as many nodes as can be scored."""
        tree, limits = self.draft, self.draft.limits
        if self._drafter.extends_to_depth:
            ends = (end for prefix in self._prefixes for end in prefix.ends)
            return all(tree.nodes[end].depth >= limits.num_nodes for end in ends)
        if self._plan.num_candidates > 1 and limits.num_chains is None:
            num_drafter_nodes = min(limits.num_nodes, self._request.num_draft_tokens)  # more are for memories
            return tree.num_drafted - self._num_before >= 4 * num_drafter_nodes
        return (tree.num_drafted if limits.num_chains is None else len(tree.ranked())) >= limits.num_nodes


ValuedPrefix = tuple[float, DrafterSession, DraftPrefix]
"""A prefix of a text, and its open value."""


def _require_numbers(largest: float) -> None:
    if not math.isfinite(largest):
        raise ModelError("the drafter's logits are not finite; roll back to the previous snapshot")
