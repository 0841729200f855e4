"""Draft tokens read as target tokens: direct, split and merged readings stand side by side in the tree.

A place is a draft text behind the emitted one. The nodes that spell it are its ends: more than one when draft tokens
can be read one by one and together.
"""

import math
from dataclasses import dataclass, replace

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, GuessKind
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.ranking import Candidate
from omnidraft.ports import AcceptanceFn, Source
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import MIN_LENGTH, NgramCache

_LONGEST_MERGE = 6
_SHADOWED_RANK = 9
_SHADOWED_SHARE = 0.1
"""Of a token by token reading where the target is known to say it as one token; the share is where counting begins."""


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """Where the drafter may be asked what comes next."""

    before: "DraftPosition | None" = None
    """None for the emitted text itself."""
    draft_id: int | None = None
    confidence: float = 1.0
    ends: tuple[int, ...] = (0,)
    row: int | None = None
    """Its number among the ids branched in this round."""
    odds: AcceptanceFn | None = None
    """Of the readings that begin here; None: their chances are measured agreement."""

    def back(self) -> list["DraftPosition"]:
        """From this place to the text, both included."""
        places = [self]
        while places[-1].before is not None:
            places.append(places[-1].before)
        return places

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """From the text to here."""
        return tuple(place.draft_id for place in reversed(self.back()) if place.draft_id is not None)


class TokenMapper:
    """Puts guesses into the tree, in every way the target may spell them."""

    def __init__(self, alignment: Alignment, cache: NgramCache, table: AcceptanceCalibrator) -> None:
        self._alignment = alignment
        self._cache = cache
        self._table = table

    def add(
        self, tree: DraftTreeBuilder, place: DraftPosition, candidate: Candidate, rank: int, style: tuple[float, float]
    ) -> DraftPosition:
        """The place behind this guess; without ends when all of its nodes would be too deep."""
        merged = self._merged(tree, place, candidate, rank, style)
        if merged:
            shadowed = replace(candidate, confidence=candidate.confidence * _SHADOWED_SHARE)
            one_by_one = [self._pieces(tree, end, shadowed, _SHADOWED_RANK, style, None) for end in place.ends]
        else:
            one_by_one = [self._pieces(tree, end, candidate, rank, style, place.odds) for end in place.ends]
        ends = dict.fromkeys(end for end in (*merged, *one_by_one) if end is not None)
        return DraftPosition(place, candidate.draft_id, candidate.confidence, tuple(ends))

    def _pieces(
        self,
        tree: DraftTreeBuilder,
        end: int,
        candidate: Candidate,
        rank: int,
        style: tuple[float, float],
        odds: AcceptanceFn | None,
    ) -> int | None:
        """The last node of a direct or split reading; of a split the odds are of its first piece."""
        pieces = self._alignment.pieces(candidate.draft_id)
        source = Source.DIRECT if len(pieces) == 1 else Source.SPLIT
        node: int | None = end
        for number, (piece, q) in enumerate(zip(pieces, _piece_q(candidate, len(pieces)), strict=True)):
            kind = GuessKind(source, rank if number == 0 else -number, style)
            confidence = candidate.confidence if number == 0 else q
            if node is not None:
                node = self._node(tree, node, piece, kind, confidence, q, odds if number == 0 else None)
        return node

    def _merged(
        self, tree: DraftTreeBuilder, place: DraftPosition, candidate: Candidate, rank: int, style: tuple[float, float]
    ) -> list[int]:
        """The nodes that say this token and those before it as one."""
        nodes: list[int] = []
        ids: tuple[int, ...] = (candidate.draft_id,)
        confidence = candidate.confidence
        for start in place.back():
            if len(ids) >= MIN_LENGTH and (token := self._cache.lookup(ids)) is not None:
                kind = GuessKind(Source.MERGE, rank, style)
                added = [self._node(tree, end, token, kind, confidence, confidence, start.odds) for end in start.ends]
                nodes += [node for node in added if node is not None]
            if start.draft_id is None or len(ids) >= min(_LONGEST_MERGE, self._cache.max_length):
                break
            ids, confidence = (start.draft_id, *ids), start.confidence * confidence
        return nodes

    def _node(
        self,
        tree: DraftTreeBuilder,
        end: int,
        token: int,
        kind: GuessKind,
        confidence: float,
        q: float,
        odds: AcceptanceFn | None,
    ) -> int | None:
        log_q = _log(q)
        measured = self._table.chance(kind, confidence, tree.nodes[end].depth + 1)
        chance = measured if odds is None else odds(log_q)
        return tree.add(end, token, kind.source, chance, log_q=log_q, guess=(kind, confidence))


def _piece_q(candidate: Candidate, num_pieces: int) -> list[float]:
    """The drafter's probability of each piece given those before it."""
    return [candidate.q, candidate.draft_share, *[1.0] * num_pieces][:num_pieces]


def _log(q: float) -> float:
    return math.log(max(q, 1e-30))
