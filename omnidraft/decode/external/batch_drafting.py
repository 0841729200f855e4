"""Chains for several texts at once: one step of the drafter goes on from the places of all of them that pay.

As drafting/drafter.py, with the policy's questions put for all texts together. Without noise and without temperature:
an engine that draws with its own noise accepts a guess with the target's probability of it, so the likeliest is best.
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
from omnidraft.decode.drafting.token_mapping import DraftPosition, TokenMapper
from omnidraft.decode.external.batch_policy import BatchPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.decode.sampling.noise import ForbiddenNoise
from omnidraft.ports import DraftSession, DraftTree, Request, TreeLimits

_STYLE = (0.0, 0.0)
"""Temperature and weight of the noise, as agreement is counted by."""
_NOISE = ForbiddenNoise()


class DraftedSequence:
    """What one snapshot knows of one text."""

    def __init__(
        self, drafter: Drafter, request: Request, told: Sequence[int], table: AcceptanceCalibrator, *, with_lookup: bool
    ) -> None:
        """
        Args:
            request: its drafter's prompt ids end before `told`, its prompt ids behind them.
            told: target ids at the end of the prompt, which the text goes on from.
        """
        self.drafter = drafter
        self.table = table
        self.stop_ids = request.stop_ids
        self.context = drafter.context(request)
        self.context.observe(told)
        self.readings = TokenMapper(drafter.alignment, drafter.cache, table)
        self.lookup = PromptLookupSession(request.prompt_ids, table) if with_lookup else None
        self.model: DraftSession | None = None
        """None until it is drafted for, and while its memory was needed elsewhere."""
        self.fed: list[int] = []
        self.root = request.prompt_ids[-1]
        self.tree: DraftTreeBuilder | None = None
        self.num_branched = 0

    def release(self) -> None:
        """Free the drafter's keys; they are computed again when the text is drafted for again."""
        self.model, self.fed = None, []

    def num_missed(self, ids: Sequence[int]) -> int:
        """How many of the text's draft ids have to be read."""
        return len(ids) - self.common(ids)

    def common(self, ids: Sequence[int]) -> int:
        """Leading ids that are read; the last one is always read again."""
        limit = min(len(self.fed), len(ids) - 1)
        if self.fed[:limit] == ids[:limit]:
            return limit
        return next(at for at in range(limit) if self.fed[at] != ids[at])

    def observe(self, emitted: Sequence[int]) -> Sequence[tuple[int, int]]:
        """The text goes on; returns the nodes that it went through, each with the id that came next."""
        reached = self.tree.walk(emitted) if self.tree is not None else []
        for node, token in reached:
            assert self.tree is not None
            for child in self.tree.children(node):
                if child.guess is not None:
                    kind, q = child.guess
                    self.table.update(kind, q, child.depth, is_right=child.token == token)
        self.context.observe(emitted)
        if self.lookup is not None:
            self.lookup.observe(emitted, reached)
        self.root, self.tree = emitted[-1], None
        return reached


@dataclass(slots=True)
class Drafted:
    """The chains of one round, and what they cost the drafter."""

    trees: list[DraftTree] = field(default_factory=list)
    step_rows: list[int] = field(default_factory=list)
    draft_s: float = 0.0


def draft(
    texts: Sequence[DraftedSequence],
    num_tokens: int,
    policy: BatchPolicy,
    step_s: CostCurve | None,
    *,
    may_open: Callable[[int], bool],
) -> Drafted:
    """A chain of at most `num_tokens` for each of these texts, which have one snapshot.

    Args:
        step_s: told what each step took; None: nobody wants to know.
        may_open: whether there is memory for the keys of so many more ids.
    """
    drafted, limits = Drafted(), TreeLimits(num_tokens, num_chains=1, depth=num_tokens)
    for text in texts:
        text.tree, text.num_branched = DraftTreeBuilder(text.root, num_tokens), 0
        if text.lookup is not None:
            text.lookup.extend(text.tree, 0, limits, _NOISE)
    if num_tokens:
        _Steps(drafted, limits, policy, step_s).run(_readers(texts, policy, may_open))
    drafted.trees = _kept([text.tree for text in texts if text.tree is not None], limits, policy)
    return drafted


def _readers(
    texts: Sequence[DraftedSequence], policy: BatchPolicy, may_open: Callable[[int], bool]
) -> list[tuple[DraftedSequence, list[int]]]:
    """The texts that the drafter is to draft for, with all their draft ids."""
    readers = []
    for text in texts:
        ids = text.context.ids
        if ids is None or not policy.should_draft(text.num_missed(ids)):
            continue
        if text.model is None:
            if not may_open(len(ids)):
                continue
            text.model = text.drafter.model.open()
        readers.append((text, ids))
    return readers


class _Steps:
    """The drafter's steps of one round."""

    def __init__(self, drafted: Drafted, limits: TreeLimits, policy: BatchPolicy, step_s: CostCurve | None) -> None:
        self._drafted = drafted
        self._limits = limits
        self._policy = policy
        self._step_s = step_s

    def run(self, readers: Sequence[tuple[DraftedSequence, list[int]]]) -> None:
        """Step until nothing more pays."""
        at_root = [(text, DraftPosition()) for text, _ in readers]
        chosen = {id(text) for text, _ in self._worth(at_root)}
        readers = [(text, ids) for text, ids in readers if id(text) in chosen]
        if not readers:
            return
        logits = self._advance(readers)
        places = [(text, _expand(text, DraftPosition(), each)) for (text, _), each in zip(readers, logits, strict=True)]
        while going_on := self._worth([(text, place) for text, place in places if self._is_open(text, place)]):
            logits = self._branch(going_on)
            places = []
            for (text, place), each in zip(going_on, logits, strict=True):
                row, text.num_branched = text.num_branched, text.num_branched + 1
                places.append((text, _expand(text, replace(place, row=row), each)))

    def _is_open(self, text: DraftedSequence, place: DraftPosition) -> bool:
        """Whether anything can stand behind it, in the drafter's memory and in the chain."""
        assert text.tree is not None
        has_room = len(text.fed) + len(place.draft_ids) <= text.drafter.model.context_limit
        return has_room and any(text.tree.nodes[end].depth < self._limits.num_nodes for end in place.ends)

    def _worth(
        self, places: Sequence[tuple[DraftedSequence, DraftPosition]]
    ) -> list[tuple[DraftedSequence, DraftPosition]]:
        """Those that the policy goes on from, the best first."""
        values = [_value(text, place) for text, place in places]
        order = sorted((at for at, value in enumerate(values) if value), key=lambda at: -values[at])
        if not order:
            return []
        num_nodes = sum(min(text.tree.num_drafted, self._limits.num_nodes) for text, _ in places if text.tree)
        return [places[at] for at in order[: self._policy.select_expansions([values[at] for at in order], num_nodes)]]

    def _advance(self, readers: Sequence[tuple[DraftedSequence, list[int]]]) -> Sequence[torch.Tensor]:
        asked = []
        for text, ids in readers:
            keep = text.common(ids)
            text.fed = list(ids)
            assert text.model is not None
            asked.append((text.model, keep, ids[keep:]))
        model = readers[0][0].drafter.model
        return self._timed(sum(len(ids) for *_, ids in asked), lambda: model.advance_all(asked))

    def _branch(self, going_on: Sequence[tuple[DraftedSequence, DraftPosition]]) -> list[torch.Tensor]:
        asked = []
        for text, place in going_on:
            assert text.model is not None
            assert place.draft_id is not None
            assert place.before is not None
            parent = -1 if place.before.row is None else place.before.row
            asked.append((text.model, [place.draft_id], [parent]))
        model = going_on[0][0].drafter.model
        return [rows[0] for rows in self._timed(len(asked), lambda: model.branch_all(asked))]

    def _timed(self, num_rows: int, compute: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        started = time.perf_counter()
        result = compute()
        spent = time.perf_counter() - started
        self._drafted.draft_s += spent
        self._drafted.step_rows.append(num_rows)
        if self._step_s is not None and num_rows <= 16:
            self._step_s.update(num_rows, spent)
        return result


def _value(text: DraftedSequence, place: DraftPosition) -> float:
    """Chance that the text comes here and that what follows has not been guessed."""
    assert text.tree is not None
    return sum(map(text.tree.open_value, place.ends))


def _expand(text: DraftedSequence, place: DraftPosition, logits_D: torch.Tensor) -> DraftPosition:
    """Add what the drafter would say here; the place behind it, without ends when it says nothing to go on from."""
    assert text.tree is not None
    candidates = CandidateRanker(logits_D, text.drafter.alignment, _STYLE[0]).best(1, _STYLE[1], _NOISE, 0)
    if not candidates:
        return DraftPosition(before=place, ends=())
    text.tree.noise_weight = 0.0
    behind = text.readings.add(text.tree, place, candidates[0], 0, _STYLE)
    text.tree.draft_ids = max(text.tree.draft_ids, behind.draft_ids, key=len)
    return replace(behind, ends=tuple(end for end in behind.ends if text.tree.nodes[end].token not in text.stop_ids))


def _kept(trees: Sequence[DraftTreeBuilder], limits: TreeLimits, policy: BatchPolicy) -> list[DraftTree]:
    """The best chain of each, as long as pays beside the others."""
    chains = [tree.ranked(limits) for tree in trees]
    nodes = [(trees[at].value(node), at) for at, chain in enumerate(chains) for node in chain]
    nodes.sort(key=lambda node: -node[0])  # stable: a chain's values never rise, so its nodes stay in order
    lengths = [0] * len(trees)
    for _, at in nodes[: policy.prune([value for value, _ in nodes])]:
        lengths[at] += 1
    return [tree.cut(chain[:length]) for tree, chain, length in zip(trees, chains, lengths, strict=True)]
