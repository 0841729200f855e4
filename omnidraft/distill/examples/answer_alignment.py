"""The answer of a trace record in both vocabularies, and the points where the two tokenisations meet.

The answer is tokenised as the drafter sees it while serving. Lengths are counted in bytes; a special id that both
vocabularies have counts as one byte, and one that the drafter does not have as none.
Shapes: P points where they meet, M merges, S splits. Positions count from the answer's first token.
Source: docs/algorithms.md, sections 1, 5 and 6.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from omnidraft.errors import WireError
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.boundary_alignment import BoundaryAlignment, align_boundaries
from omnidraft.vocab.retokenise import retokenise
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class AlignedAnswer:
    """An answer so far in both vocabularies. Positions count from its first token, this segment's or earlier."""

    draft_ids: np.ndarray
    target_ids: np.ndarray
    num_before: int  # target ids of earlier segments
    met: BoundaryAlignment
    draft_ends: np.ndarray
    target_ends: np.ndarray
    target_lengths: np.ndarray
    settled: int
    """The byte from which on the tokenisation may change when the text continues; tokens that end before it stay."""

    def choose(self, *, first_draft_position: int) -> tuple[np.ndarray, dict[str, int]]:
        """Return which of the meeting points are positions, and the number of other emitted tokens by reason."""
        starts_P = (self.target_ends - self.target_lengths)[self.met.target_P]
        of_segment_P = self.met.target_P >= self.num_before
        settled_P = starts_P <= self.settled
        inside_P = self.met.draft_P >= first_draft_position
        num_emitted = len(self.target_ids) - self.num_before
        skipped = Counter(
            inside_a_draft_token=num_emitted - int(of_segment_P.sum()),
            after_the_last_safe_boundary=int((of_segment_P & ~settled_P).sum()),
            outside_the_window=int((of_segment_P & settled_P & ~inside_P).sum()),
        )
        return of_segment_P & settled_P & inside_P, dict(+skipped)

    def merges(self) -> list[tuple[int, int, int]]:
        """Return (target position, first draft position, one past the last) of the segment's settled merges."""
        return [
            (target, first, end)
            for target, first, end in self.met.merges_M3.tolist()
            if target >= self.num_before and self.target_ends[target] <= self.settled
        ]

    def splits(self) -> list[tuple[int, int, int]]:
        """Return (draft position, first target position, one past the last) of the segment's settled splits.

        A split has no special id inside, which the draft token would not spell.
        """
        return [
            (draft, first, end)
            for draft, first, end in self.met.splits_S3.tolist()
            if first >= self.num_before
            and self.draft_ends[draft] <= self.settled
            and self.target_lengths[first:end].all()
        ]


def align_answer(tokenizer: Tokenizer, target: Vocabulary, alignment: Alignment, record: TraceRecord) -> AlignedAnswer:
    """Return the answer of a record in both vocabularies.

    Raises:
        VocabularyError: the drafter's vocabulary cannot spell the text.
        WireError: an id lies outside the target's vocabulary.
    """
    target_ids = np.concatenate([record.before_ids, record.emitted_ids]).astype(np.int64)
    require_inside(target_ids, len(target), "target")
    answer_ids = np.array(retokenise(target_ids.tolist(), target, tokenizer, alignment), np.int64)
    draft_lengths = np.maximum(tokenizer.vocabulary.num_bytes[answer_ids], 1)
    is_partnered = alignment.drafts_of_target.lengths[target_ids] > 0
    target_lengths = np.maximum(target.num_bytes[target_ids], is_partnered)
    target_ends = np.cumsum(target_lengths)
    return AlignedAnswer(
        draft_ids=answer_ids,
        target_ids=target_ids,
        num_before=len(record.before_ids),
        met=align_boundaries(draft_lengths, target_lengths),
        draft_ends=np.cumsum(draft_lengths),
        target_ends=target_ends,
        target_lengths=target_lengths,
        settled=int(target_ends[-1]) if record.finish_reason else _settled(tokenizer, target, target_ids, target_ends),
    )


def require_inside(ids: np.ndarray, size: int, which: str) -> None:
    """Raise WireError when an id lies outside a vocabulary of this size."""
    if len(ids) and int(ids.max()) >= size:
        raise WireError(f"{which} id {int(ids.max())} lies outside a vocabulary of {size}")


def _settled(tokenizer: Tokenizer, target: Vocabulary, target_ids: np.ndarray, target_ends: np.ndarray) -> int:
    """Return the byte of the last special id's end, or of the last safe boundary behind it."""
    special_at = np.flatnonzero(np.isin(target_ids, list(target.special_ids)))
    num_before = int(special_at[-1]) + 1 if len(special_at) else 0
    text = target.spell(target_ids[num_before:].tolist()).decode("utf-8", "surrogateescape")
    cuts = [match.start() for match in tokenizer.vocabulary.boundary.finditer(text)]
    settled = int(target_ends[num_before - 1]) if num_before else 0
    return settled + (len(text[: cuts[-1]].encode("utf-8", "surrogateescape")) if cuts else 0)
