"""Maps draft tokens to target tokens: direct, split and merged readings stand side by side in the tree.

A prefix is draft text after the emitted text. The nodes that spell it are its ends: more than one when its draft tokens
can be read one by one and together, none where a target token reaches across its end.
"""

import math
from dataclasses import dataclass, field

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, CandidateKind
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.ranking import Candidate
from omnidraft.decode.drafting.token_healing import TokenHealing
from omnidraft.ports import AcceptanceFn, Source
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import MIN_LENGTH, NgramCache

_LONGEST_MERGE = 6
_SHADOWED_RANK = 9
"""Rank and prior share of a token by token reading where the n-gram cache knows that the target uses one token."""
_SHADOWED_SHARE = 0.1


AFTER_TEXT = -1
"""Row of the prefixes whose keys the drafter has with those of the text; see ports.DraftSession.branch."""


@dataclass(slots=True, eq=False)
class DraftPrefix:
    """Draft text that the drafter can continue."""

    before: "DraftPrefix | None" = None
    """The prefix without its last draft token; None for the emitted text itself, or where the prefix heals, for the
    text without its last id."""
    draft_id: int | None = None
    confidence: float = 1.0
    ends: tuple[int, ...] = (0,)
    share: float = 1.0
    """Share of what may follow the ends that continues this prefix; less than 1 beside others with the same ends."""
    row: int | None = None
    """Number among the ids branched in this round, or AFTER_TEXT; None before it was branched."""
    acceptance: AcceptanceFn | None = None
    """Acceptance head's function for the readings that begin here; None uses measured agreement."""
    heals: bool = False
    """Whether the next draft token begins with the line break that the emitted text ends with; see token_healing.py."""

    draft_ids: tuple[int, ...] = field(default=(), init=False)
    """Draft ids from what the drafter has read of the emitted text to here."""

    def __post_init__(self) -> None:
        if self.before is not None and self.draft_id is not None:
            self.draft_ids = (*self.before.draft_ids, self.draft_id)

    def unbranched(self) -> list["DraftPrefix"]:
        """Return the prefixes up to this one that were not branched, the shortest first."""
        prefixes: list[DraftPrefix] = []
        prefix: DraftPrefix | None = self
        while prefix is not None and prefix.row is None:
            prefixes.insert(0, prefix)
            prefix = prefix.before
        return prefixes

    @property
    def begins_in_text(self) -> bool:
        """Whether its draft token begins before the end of the emitted text."""
        return self.before is not None and self.before.heals


class TokenMapper:
    """Adds candidates to the tree, in every way the target may spell them."""

    def __init__(
        self,
        alignment: Alignment,
        cache: NgramCache,
        calibrator: AcceptanceCalibrator,
        healing: TokenHealing | None = None,
    ) -> None:
        self._alignment, self._healing = alignment, healing
        self._cache = cache
        self._calibrator = calibrator

    def alignment_at(self, prefix: DraftPrefix) -> Alignment:
        """Return how draft tokens after this prefix are spelled in target tokens."""
        return self._healing.alignment if prefix.heals and self._healing is not None else self._alignment

    def add(
        self, tree: DraftTreeBuilder, prefix: DraftPrefix, candidate: Candidate, rank: int, style: tuple[float, float]
    ) -> DraftPrefix:
        """Return the prefix after this candidate; without ends when all of its nodes would be too deep."""
        pieces = self.alignment_at(prefix).pieces(candidate.draft_id)
        merged = self._merged(tree, prefix, candidate, rank, style)
        read, acceptance = candidate, prefix.acceptance
        if merged:
            read = candidate._replace(confidence=candidate.confidence * _SHADOWED_SHARE)
            rank, acceptance = _SHADOWED_RANK, None
        one_by_one = [self._pieces(tree, end, pieces, read, rank, style, acceptance) for end in prefix.ends]
        ends = dict.fromkeys(end for end in (*merged, *one_by_one) if end is not None)
        return DraftPrefix(prefix, candidate.draft_id, candidate.confidence, tuple(ends))

    def _pieces(
        self,
        tree: DraftTreeBuilder,
        end: int,
        pieces: tuple[int, ...],
        candidate: Candidate,
        rank: int,
        style: tuple[float, float],
        acceptance: AcceptanceFn | None,
    ) -> int | None:
        """Return the last node of a direct or split reading; the acceptance head's estimate is that of the first
        piece."""
        source = Source.DIRECT if len(pieces) == 1 else Source.SPLIT
        node: int | None = end
        for number, (piece, q) in enumerate(zip(pieces, _piece_q(candidate, len(pieces)), strict=True)):
            kind = CandidateKind(source, rank if number == 0 else -number, style)
            confidence = candidate.confidence if number == 0 else q
            if node is not None:
                node = self._node(tree, node, piece, kind, confidence, q, acceptance if number == 0 else None)
        return node

    def _merged(
        self, tree: DraftTreeBuilder, prefix: DraftPrefix, candidate: Candidate, rank: int, style: tuple[float, float]
    ) -> list[int]:
        """Return the nodes that spell this token and the ones before it as one target token."""
        nodes: list[int] = []
        ids: tuple[int, ...] = (candidate.draft_id,)
        confidence, ancestor = candidate.confidence, prefix
        while True:
            if len(ids) >= MIN_LENGTH and (token := self._cache.lookup(ids)) is not None:
                kind = CandidateKind(Source.MERGE, rank, style)
                for end in ancestor.ends:
                    node = self._node(tree, end, token, kind, confidence, confidence, ancestor.acceptance)
                    nodes += [] if node is None else [node]
            is_longest = len(ids) >= min(_LONGEST_MERGE, self._cache.max_length)
            if ancestor.before is None or ancestor.draft_id is None or ancestor.begins_in_text or is_longest:
                return nodes
            ids, confidence = (ancestor.draft_id, *ids), ancestor.confidence * confidence
            ancestor = ancestor.before

    def _node(
        self,
        tree: DraftTreeBuilder,
        end: int,
        token: int,
        kind: CandidateKind,
        confidence: float,
        q: float,
        acceptance: AcceptanceFn | None,
    ) -> int | None:
        log_q = _log(q)
        measured = self._calibrator.estimate(kind, confidence, tree.nodes[end].depth + 1)
        probability = measured if acceptance is None else acceptance(log_q)
        return tree.add(end, token, kind.source, probability, log_q=log_q, estimated_from=(kind, confidence))


def _piece_q(candidate: Candidate, num_pieces: int) -> list[float]:
    """Return the drafter's probability of each piece given the pieces before it."""
    return [candidate.q, candidate.draft_share, *[1.0] * num_pieces][:num_pieces]


def _log(q: float) -> float:
    return math.log(max(q, 1e-30))
