"""The answer of a trace record in both vocabularies, and where the two tokenisations meet.

Shapes: P places where they meet, D draft and T target tokens. Positions count from the answer's first token.
The answer is tokenised as the drafter sees it while serving: its bytes, without tokens that have none.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from omnidraft.errors import WireError
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.positions import Walk, walk
from omnidraft.vocab.retokenise import tokenise_bytes
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer so far in both vocabularies. Positions count from its first token, this segment's or earlier."""

    draft_ids: np.ndarray
    target_ids: np.ndarray
    num_before: int  # target ids of earlier segments
    met: Walk
    draft_ends: np.ndarray
    target_ends: np.ndarray
    target_num_bytes: np.ndarray
    num_settled_bytes: int

    def choose(self, *, first_draft_position: int) -> tuple[np.ndarray, dict[str, int]]:
        """Which of the meeting points are positions, and why the other emitted tokens are none."""
        starts_P = (self.target_ends - self.target_num_bytes)[self.met.target_P]
        of_segment_P = self.met.target_P >= self.num_before
        settled_P = starts_P <= self.num_settled_bytes
        inside_P = self.met.draft_P >= first_draft_position
        num_emitted = len(self.target_ids) - self.num_before
        skipped = Counter(
            inside_a_draft_token=num_emitted - int(of_segment_P.sum()),
            after_the_last_safe_boundary=int((of_segment_P & ~settled_P).sum()),
            outside_the_window=int((of_segment_P & settled_P & ~inside_P).sum()),
        )
        return of_segment_P & settled_P & inside_P, dict(+skipped)

    def merges(self) -> list[tuple[int, int, int]]:
        """(target position, first draft position, one past the last), of this segment and settled."""
        return [
            (target, first, end)
            for target, first, end in self.met.merges_M3.tolist()
            if target >= self.num_before and self.target_ends[target] <= self.num_settled_bytes
        ]

    def splits(self) -> list[tuple[int, int, int]]:
        """(draft position, first target position, one past the last), of this segment and settled; none with a
        special id inside, which the draft token does not spell."""
        return [
            (draft, first, end)
            for draft, first, end in self.met.splits_S3.tolist()
            if first >= self.num_before
            and self.draft_ends[draft] <= self.num_settled_bytes
            and self.target_num_bytes[first:end].all()
        ]


def read_answer(tokenizer: Tokenizer, target: Vocabulary, record: TraceRecord) -> Answer:
    """
    Raises:
        VocabularyError: the drafter's vocabulary cannot spell the text.
        WireError: an id lies outside the target's vocabulary.
    """
    target_ids = np.concatenate([record.before_ids, record.emitted_ids]).astype(np.int64)
    require_inside(target_ids, len(target), "target")
    text = target.spell(target_ids.tolist())
    draft_ids = np.array(tokenise_bytes(tokenizer, text), np.int64)
    draft_num_bytes = tokenizer.vocabulary.num_bytes[draft_ids]
    target_num_bytes = target.num_bytes[target_ids]
    return Answer(
        draft_ids=draft_ids,
        target_ids=target_ids,
        num_before=len(record.before_ids),
        met=walk(draft_num_bytes, target_num_bytes),
        draft_ends=np.cumsum(draft_num_bytes),
        target_ends=np.cumsum(target_num_bytes),
        target_num_bytes=target_num_bytes,
        num_settled_bytes=len(text) if record.finish_reason else _settled_bytes(tokenizer, text),
    )


def require_inside(ids: np.ndarray, size: int, which: str) -> None:
    """Raises WireError."""
    if len(ids) and int(ids.max()) >= size:
        raise WireError(f"{which} id {int(ids.max())} lies outside a vocabulary of {size}")


def _settled_bytes(tokenizer: Tokenizer, data: bytes) -> int:
    """Bytes before the last safe boundary: what follows may be tokenised otherwise when the text goes on."""
    text = data.decode("utf-8", "surrogateescape")
    cuts = [found.start() for found in tokenizer.vocabulary.boundary.finditer(text)]
    return len(text[: cuts[-1]].encode("utf-8", "surrogateescape")) if cuts else 0
