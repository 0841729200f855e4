"""A trace record as the learner reads it: draft ids, and what is asked of the drafter at which of them.

Shapes: T draft ids of prompt and answer, P positions where an emitted target token begins at a draft boundary,
M draft pieces of emitted n-grams. `at` is the index of the draft id whose hidden state predicts.
The answer is tokenised as the drafter sees it while serving: its bytes, without tokens that have none; so the end of
the text is asked for at the last boundary, and special ids inside the text are predicted but never read.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.distill.belief_buckets import BeliefBuckets, Split, belief_buckets
from omnidraft.errors import WireError
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.positions import Walk, walk
from omnidraft.vocab.retokenise import tokenise_bytes
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class Ngram:
    """Draft tokens that spell one emitted target token."""

    draft_ids: tuple[int, ...]
    target_id: int


@dataclass(frozen=True, slots=True)
class Positions:
    """What one record teaches."""

    ids_T: np.ndarray
    """int64; prompt and answer in draft ids, the front of the prompt cut to fit the window."""
    at_P: np.ndarray
    """int64; positions of emitted target tokens."""
    emitted_P: np.ndarray
    """int64; the target ids emitted there."""
    buckets: BeliefBuckets | None
    """Of the same P positions; None when the target told no log-probabilities."""
    piece_at_M: np.ndarray  # int64
    piece_ids_M: np.ndarray  # int64, the draft id that comes next there
    piece_row_M: np.ndarray  # int64, row in P of the target token that the piece belongs to
    ngrams: tuple[Ngram, ...]
    """For the n-gram cache; cut positions included."""
    num_emitted: int
    skipped: Mapping[str, int]
    """Emitted tokens that are no position, by reason."""


class PositionReader:
    """Reads records of one vocabulary pair."""

    def __init__(
        self, draft_tokenizer: Tokenizer, target_vocabulary: Vocabulary, alignment: Alignment, *, max_tokens: int
    ) -> None:
        self._tokenizer, self._target, self._alignment = draft_tokenizer, target_vocabulary, alignment
        self._max_tokens = max_tokens

    def read(self, record: TraceRecord) -> Positions:
        """
        Raises:
            VocabularyError: the drafter's vocabulary cannot spell the text.
            WireError: an id lies outside its vocabulary.
        """
        answer = self._answer(record)
        prompt_T = record.drafter_prompt_ids.astype(np.int64)
        ids_T = np.concatenate([prompt_T, answer.draft_ids])[-self._max_tokens :]
        shift = len(prompt_T) + len(answer.draft_ids) - len(ids_T)
        to_index = len(prompt_T) - shift - 1  # of the id before a draft position of the answer
        chosen, skipped = answer.choose(first_draft_position=-to_index)
        emitted_P = answer.met.target_P[chosen] - answer.num_before
        at_P = answer.met.draft_P[chosen] + to_index
        row_of = {int(target): row for row, target in enumerate(answer.met.target_P[chosen])}
        merges = answer.merges()
        pieces_M3 = _pieces(answer, merges, row_of, to_index)
        return Positions(
            ids_T=ids_T,
            at_P=at_P,
            emitted_P=record.emitted_ids[emitted_P].astype(np.int64),
            buckets=self._buckets(record, answer, emitted_P, row_of),
            piece_at_M=pieces_M3[:, 0],
            piece_ids_M=pieces_M3[:, 1],
            piece_row_M=pieces_M3[:, 2],
            ngrams=tuple(
                Ngram(tuple(answer.draft_ids[first:end].tolist()), int(answer.target_ids[target]))
                for target, first, end in merges
            ),
            num_emitted=len(record.emitted_ids),
            skipped=skipped,
        )

    def _answer(self, record: TraceRecord) -> "_Answer":
        target_ids = np.concatenate([record.before_ids, record.emitted_ids]).astype(np.int64)
        _require_inside(target_ids, len(self._target), "target")
        _require_inside(record.drafter_prompt_ids, self._alignment.num_draft, "draft")
        text = self._target.spell(target_ids.tolist())
        draft_ids = np.array(tokenise_bytes(self._tokenizer, text), np.int64)
        draft_num_bytes = self._tokenizer.vocabulary.num_bytes[draft_ids]
        target_num_bytes = self._target.num_bytes[target_ids]
        return _Answer(
            draft_ids=draft_ids,
            target_ids=target_ids,
            num_before=len(record.before_ids),
            met=walk(draft_num_bytes, target_num_bytes),
            draft_ends=np.cumsum(draft_num_bytes),
            target_ends=np.cumsum(target_num_bytes),
            target_num_bytes=target_num_bytes,
            num_settled_bytes=len(text) if record.finish_reason else self._settled_bytes(text),
        )

    def _settled_bytes(self, data: bytes) -> int:
        """Bytes before the last safe boundary: what follows may be tokenised otherwise when the text goes on."""
        text = data.decode("utf-8", "surrogateescape")
        cuts = [found.start() for found in self._tokenizer.vocabulary.boundary.finditer(text)]
        return len(text[: cuts[-1]].encode("utf-8", "surrogateescape")) if cuts else 0

    def _buckets(
        self, record: TraceRecord, answer: "_Answer", emitted_P: np.ndarray, row_of: Mapping[int, int]
    ) -> BeliefBuckets | None:
        if record.beliefs is None:
            return None
        log_p_E = record.beliefs.emitted_log_p_E.astype(np.float64)
        splits = [
            Split(
                row=row_of[first],
                draft_id=int(answer.draft_ids[draft]),
                first_target=int(answer.target_ids[first]),
                p=float(np.exp(log_p_E[first - answer.num_before : end - answer.num_before].sum())),
            )
            for draft, first, end in answer.splits()
            if first in row_of
        ]
        return belief_buckets(record.beliefs, emitted_P, self._alignment, splits)


@dataclass(frozen=True, slots=True)
class _Answer:
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


def _pieces(
    answer: _Answer, merges: Sequence[tuple[int, int, int]], row_of: Mapping[int, int], to_index: int
) -> np.ndarray:
    """[M, 3]: at, draft id that comes next, row of the position."""
    pieces = [
        (first + n + to_index, int(answer.draft_ids[first + n]), row_of[target])
        for target, first, end in merges
        if target in row_of
        for n in range(end - first)
    ]
    return np.array(pieces, np.int64).reshape(-1, 3)


def _require_inside(ids: np.ndarray, size: int, which: str) -> None:
    if len(ids) and int(ids.max()) >= size:
        raise WireError(f"{which} id {int(ids.max())} lies outside a vocabulary of {size}")
