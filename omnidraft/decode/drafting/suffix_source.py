"""Suffix memory as a draft source: drafts what followed the longest end of the text that was said before.

Three memories are asked, from near to far: this text, what this worker said lately in the same scope, and the fleet's
memory of the tenant. Where this text repeats itself with changes, what followed the same place before is drafted too,
since an exact match ends at every change. From each the tree grows greedily, by the product of the estimated acceptance
along a path.
Source: SuffixDecoding, https://arxiv.org/abs/2411.04975; docs/algorithms.md section 12.
"""

import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush

from omnidraft.decode.drafting.acceptance_stats import (
    AcceptanceCalibrator,
    CandidateKind,
    MatchBin,
    Memory,
    temperature_bin,
)
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.tree_proposer import DraftSource, DraftSourceSession
from omnidraft.memory.incremental_index import IncrementalIndex
from omnidraft.memory.local_alignment import LocalAlignment
from omnidraft.memory.match import SuffixMatch
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.memory.suffix_index import MAX_LENGTH, SuffixIndex
from omnidraft.ports import Request, RoundPlan, Source

FleetMemory = Callable[[str], SuffixIndex | None]
"""Tenant -> what the whole fleet said to it; None where nothing is known of it."""

_MIN_LENGTH = 2
"""Shorter matches draft nothing."""
_LENGTH_EDGES = (3, 4, 6, 8, 12, 16, 24, 32, 48)
_COUNT_EDGES = (2, 4, 16)
_MAX_SIBLINGS = 4
_MAX_ALIGNED = 2
"""Places in the same text that resemble its end, from which is drafted at most."""
_MIN_VALUE = 0.02
"""Nodes that are reached less often are not drafted, except the first ones, from which acceptance is learned again."""
_DOUBT: Mapping[Memory, float] = {
    "text": 2.0,
    "recent": 6.0,
    "fleet": 6.0,
    "aligned": 3.0,
    "predicted": 0.6,
    "changed": 60.0,
}
"""How far a match is mistrusted before anything was measured: of 1,000 continuations of a match of two tokens that
occurred once, 600 are right within a text and 330 in others; with ten tokens 800 and 650 (answers of Qwen2.5-Coder-1.5B
to GSM8K, edits of code and extraction). Behind an alignment with a score of 6 whose last token is equal 690 are right,
and 100 behind a changed one."""


def scope_of(request: Request) -> tuple[str, str | None]:
    """Return the scope of a text: texts are drafted from for their own tenant only, and for those who may share
    keys."""
    return request.tenant, request.cache_scope


def no_fleet_memory(tenant: str) -> SuffixIndex | None:
    """Implement FleetMemory for a fleet that remembers nothing."""
    return None


@dataclass(frozen=True, slots=True)
class SuffixSource(DraftSource):
    """Drafts from the text itself, from those of the worker and from those of the fleet."""

    vocab_size: int
    """Ids from here on are never drafted, whatever a memory holds."""
    recent: RecentTexts = field(default_factory=lambda: RecentTexts(0))
    fleet: FleetMemory = no_fleet_memory

    def open(self, request: Request, calibrator: AcceptanceCalibrator) -> "SuffixSession":
        """See tree_proposer.DraftSource. The fleet's memory is asked for in each round, so that what is to be forgotten
        is drafted no more."""
        return SuffixSession(self, request, calibrator)


class SuffixSession(DraftSourceSession):
    """What one text has said, and where the memories go on behind its end."""

    def __init__(self, source: SuffixSource, request: Request, calibrator: AcceptanceCalibrator) -> None:
        self._source = source
        self._scope = scope_of(request)
        self._tenant = request.tenant
        self._drafting = MatchDrafting(request, Source.SUFFIX, source.vocab_size, calibrator, behind_changed="aligned")
        self._text = IncrementalIndex()
        self._alignment = LocalAlignment()
        self._append(request.prompt_ids)

    def extend(self, draft: DraftTreeBuilder, plan: RoundPlan) -> None:
        """Draft from each memory, where searching them pays."""
        if draft.limits.num_nodes and plan.should_search(draft.index):
            started_s = time.perf_counter()
            for memory, match in self._matches():
                self._drafting.extend(draft, memory, match, draft.limits.num_nodes)
            draft.search_s += time.perf_counter() - started_s

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """See tree_proposer.DraftSourceSession."""
        self._append(emitted)

    def _append(self, ids: Sequence[int]) -> None:
        self._text.append(ids)
        self._alignment.append(ids)

    def _matches(self) -> Iterator[tuple[Memory, SuffixMatch]]:
        """Yield the longest match in each memory that has one, then alignments that say more than that of this text."""
        min_score = _MIN_LENGTH
        ending = self._text.ids[-MAX_LENGTH:]
        fleet = self._source.fleet(self._tenant)
        recent = [index.longest_match(ending) for index in self._source.recent.of(self._scope)]
        asked: tuple[tuple[Memory, list[SuffixMatch | None]], ...] = (
            ("text", [self._text.longest_match(ending)]),
            ("recent", recent),
            ("fleet", [None if fleet is None else fleet.longest_match(ending)]),
        )
        for memory, matches in asked:
            longest = max((each for each in matches if each is not None), key=lambda each: each.length, default=None)
            if longest is not None and longest.length >= _MIN_LENGTH:
                yield memory, longest
                if memory == "text":
                    min_score = longest.length + 1
        yield from self._aligned(min_score)

    def _aligned(self, min_score: int) -> Iterator[tuple[Memory, SuffixMatch]]:
        """Yield the places in this text that its end, with changes, resembles by at least `min_score`."""
        for place in self._alignment.best(_MAX_ALIGNED):
            if place.score < min_score:
                return  # the others say less still
            match = SuffixMatch(self._text.ids, [place.position], place.score, 1)
            yield "aligned" if place.is_equal else "changed", match


class MatchDrafting:
    """Drafts what followed a match, for one text."""

    def __init__(
        self,
        request: Request,
        source: Source,
        vocab_size: int,
        calibrator: AcceptanceCalibrator,
        *,
        behind_changed: Memory,
    ) -> None:
        """
        Args:
            vocab_size: ids from here on are never drafted, whatever a memory holds.
            behind_changed: where a match stands one token behind a changed one.
        """
        self._source, self._vocab_size, self._calibrator = source, vocab_size, calibrator
        self._behind_changed, self._stop_ids = behind_changed, request.stop_ids
        style = (temperature_bin(request.sampling.temperature), 0.0)
        self._kinds: Callable[[MatchBin], list[CandidateKind]] = cache(
            lambda bins: [CandidateKind(source, rank, style, bins) for rank in range(_MAX_SIBLINGS)]
        )
        """The kinds of siblings, the first choice first."""

    def extend(
        self,
        tree: DraftTreeBuilder,
        memory: Memory,
        match: SuffixMatch,
        num_nodes: int,
        probability: float | None = None,
    ) -> None:
        """Extend the most probable path, again and again, by up to `num_nodes` nodes in all. `probability`: that of the
        match's only continuation, where more is known than the length of the match."""
        paths = [(-1.0, 0, memory, match)]
        num_added = 0
        while paths and num_added < num_nodes:
            value, node, memory, match = heappop(paths)
            depth, continuations = tree.nodes[node].depth + 1, match.continuations(_MAX_SIBLINGS)
            bins = MatchBin(memory, bisect(_LENGTH_EDGES, match.length), bisect(_COUNT_EDGES, match.count))
            for kind, (token, count) in zip(self._kinds(bins), continuations, strict=False):
                prior = _prior(memory, match, count) if node or probability is None else probability
                acceptance = self._calibrator.estimate(kind, prior, depth)
                if token >= self._vocab_size or (node and -value * acceptance < _MIN_VALUE):
                    continue
                child = tree.add(node, token, self._source, acceptance, estimated_from=(kind, prior))
                if child is not None:
                    num_added += 1
                    longer = match.extend(token)
                    if longer is not None and token not in self._stop_ids:
                        found_in = self._behind_changed if memory == "changed" else memory
                        heappush(paths, (value * acceptance, child, found_in, longer))


def _prior(memory: Memory, match: SuffixMatch, count: int) -> float:
    """Return the probability of a continuation by its frequency, as far as length and number of the matches speak for
    it."""
    return count / (match.count + _DOUBT[memory] / (match.length + 1))
