"""A trace record as a training example: draft ids, and the targets that each loss has at some of them.

Shapes: T draft ids of prompt and answer, P positions where an emitted target token begins at a draft boundary, M draft
pieces of emitted n-grams. `at` is the index of the draft id whose hidden state predicts.
The end of the text is predicted at the last boundary. Special ids inside the text are predicted too, and are input
where the drafter has them. See docs/algorithms.md, section 6.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from omnidraft.distill.examples.acceptance_labels import acceptance_targets
from omnidraft.distill.examples.answer_alignment import AlignedAnswer, align_answer, require_inside
from omnidraft.distill.examples.buckets import (
    Split,
    bucket_targets,
    certain_buckets,
    direct_buckets,
)
from omnidraft.distill.examples.chunks import AlmSettings, Chunker
from omnidraft.distill.examples.targets import AcceptanceTargets, Kind, LossTargets, Positions
from omnidraft.errors import VocabularyError, WireError
from omnidraft.traces.record import TargetLogprobs, TraceRecord
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ngram:
    """Draft tokens that spell one emitted target token."""

    draft_ids: tuple[int, ...]
    target_id: int


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """Everything that one record teaches."""

    ids_T: np.ndarray
    """int64; prompt and answer in draft ids, the front of the prompt cut to fit the window."""
    at_P: np.ndarray
    """int64; the positions."""
    emitted_P: np.ndarray
    """int64; the target ids emitted there."""
    piece_at_M: np.ndarray  # int64
    piece_ids_M: np.ndarray  # int64, the draft id that comes next there
    piece_row_M: np.ndarray  # int64, row in P of the target token that the piece belongs to
    targets: Mapping[Kind, LossTargets[np.ndarray]]
    """The targets of the losses; without the target's log-probabilities "emitted" and "piece" alone."""
    acceptance: AcceptanceTargets[np.ndarray]
    """The targets of the acceptance head."""
    ngrams: tuple[Ngram, ...]
    """Entries for the n-gram cache; positions outside the window included."""
    num_emitted: int
    skipped: Mapping[str, int]
    """Emitted tokens that are no position, by reason."""

    @classmethod
    def of_text(
        cls,
        ids_T: np.ndarray,
        at_P: np.ndarray,
        emitted_P: np.ndarray,
        targets: Mapping[Kind, LossTargets[np.ndarray]],
    ) -> Self:
        """Return what a text teaches that is no record: nothing about drafting."""
        none, none_32 = np.zeros(0, np.int64), np.zeros(0, np.float32)
        return cls(
            ids_T=ids_T,
            at_P=at_P,
            emitted_P=emitted_P,
            piece_at_M=none,
            piece_ids_M=none,
            piece_row_M=none,
            targets=targets,
            acceptance=AcceptanceTargets(none, none_32, none_32),
            ngrams=(),
            num_emitted=len(at_P),
            skipped={},
        )

    @property
    def num_context(self) -> int:
        """The number of ids before the first row that a target looks at; one less than all without targets."""
        first = [int(at.min()) for at in (self.at_P, self.piece_at_M) if len(at)]
        return min(first, default=max(len(self.ids_T) - 1, 0))


class ExampleBuilder:
    """Builds training examples from the records of one vocabulary pair."""

    def __init__(
        self,
        draft_tokenizer: Tokenizer,
        target_vocabulary: Vocabulary,
        alignment: Alignment,
        *,
        max_tokens: int,
        alm: AlmSettings | None = None,
    ) -> None:
        self._tokenizer, self._target, self._alignment = draft_tokenizer, target_vocabulary, alignment
        self._max_tokens = max_tokens
        self._chunker = Chunker(alm or AlmSettings(), draft_tokenizer.vocabulary, target_vocabulary)

    def build_readable(self, records: Sequence[TraceRecord], skipped: Counter[str]) -> list[TrainingExample]:
        """Return the examples of the records that can be read, and count the rest, by reason."""
        examples = []
        for record in records:
            try:
                examples.append(self.build(record))
            except (VocabularyError, WireError) as exc:
                logger.warning("record %s of request %s skipped: %s", record.segment, record.request_id, exc)
                skipped["unreadable_text"] += 1
        for example in examples:
            skipped.update(example.skipped)
            skipped["without_beliefs"] += "boundary" not in example.targets
        return examples

    def build(self, record: TraceRecord) -> TrainingExample:
        """Return the training example of a record.

        Raises:
            VocabularyError: the drafter's vocabulary cannot spell the text.
            WireError: an id lies outside its vocabulary.
        """
        require_inside(record.drafter_prompt_ids, self._alignment.num_draft, "draft")
        answer = align_answer(self._tokenizer, self._target, self._alignment, record)
        prompt_T = record.drafter_prompt_ids.astype(np.int64)
        ids_T = np.concatenate([prompt_T, answer.draft_ids])[-self._max_tokens :]
        shift = len(prompt_T) + len(answer.draft_ids) - len(ids_T)
        to_index = len(prompt_T) - shift - 1  # of the id before a draft position of the answer
        chosen, skipped = answer.choose(first_draft_position=-to_index)
        target_P, draft_P = answer.met.target_P[chosen], answer.met.draft_P[chosen]
        positions = Positions(
            at_P=draft_P + to_index,
            emitted_P=target_P - answer.num_before,
            draft_P=self._next_draft_ids(answer, target_P, draft_P),
        )
        row_of = {int(target): row for row, target in enumerate(target_P)}
        merges = answer.merges()
        pieces_M3 = _pieces(answer, merges, row_of, to_index)
        return TrainingExample(
            ids_T=ids_T,
            at_P=positions.at_P,
            emitted_P=answer.target_ids[target_P],
            piece_at_M=pieces_M3[:, 0],
            piece_ids_M=pieces_M3[:, 1],
            piece_row_M=pieces_M3[:, 2],
            targets=self._targets(record, answer, positions, row_of, ids_T, pieces_M3),
            acceptance=acceptance_targets(record, positions, self._alignment.draft_first_T),
            ngrams=tuple(
                Ngram(tuple(answer.draft_ids[first:end].tolist()), int(answer.target_ids[target]))
                for target, first, end in merges
            ),
            num_emitted=len(record.emitted_ids),
            skipped=skipped,
        )

    def _next_draft_ids(self, answer: AlignedAnswer, target_P: np.ndarray, draft_P: np.ndarray) -> np.ndarray:
        """Return the draft token that begins at each position; for a special id its partner."""
        partner_P = self._alignment.draft_first_T[answer.target_ids[target_P]]
        next_P = np.append(answer.draft_ids, self._alignment.num_draft)[draft_P]
        return np.where(answer.target_lengths[target_P] > 0, next_P, partner_P)

    def _targets(
        self,
        record: TraceRecord,
        answer: AlignedAnswer,
        positions: Positions,
        row_of: Mapping[int, int],
        ids_T: np.ndarray,
        pieces_M3: np.ndarray,
    ) -> dict[Kind, LossTargets[np.ndarray]]:
        is_draftable_P = positions.draft_P < self._alignment.num_draft
        piece_at_M, piece_ids_M, _ = pieces_M3.T
        tokens: dict[Kind, LossTargets[np.ndarray]] = {
            "emitted": certain_buckets(positions.at_P[is_draftable_P], positions.draft_P[is_draftable_P]),
            "piece": certain_buckets(piece_at_M, piece_ids_M),
        }
        if (logprobs := record.beliefs) is None:
            return tokens
        has_bytes_E = self._target.num_bytes[answer.target_ids[answer.num_before :]] > 0
        return tokens | {
            "boundary": bucket_targets(logprobs, positions, self._alignment, _splits(logprobs, answer, row_of)),
            "direct": direct_buckets(logprobs, positions, self._alignment),
            "chunk": self._chunker.chunks(logprobs, positions, ids_T, has_bytes_E),
        }


def _splits(logprobs: TargetLogprobs, answer: AlignedAnswer, row_of: Mapping[int, int]) -> list[Split]:
    log_p_E = logprobs.emitted_log_p_E.astype(np.float64)
    return [
        Split(
            row=row_of[first],
            draft_id=int(answer.draft_ids[draft]),
            first_target=int(answer.target_ids[first]),
            p=float(np.exp(log_p_E[first - answer.num_before : end - answer.num_before].sum())),
        )
        for draft, first, end in answer.splits()
        if first in row_of
    ]


def _pieces(
    answer: AlignedAnswer, merges: Sequence[tuple[int, int, int]], row_of: Mapping[int, int], to_index: int
) -> np.ndarray:
    """Return where each piece is predicted, the draft id that comes next, and the row of its position, int64 [M, 3]."""
    pieces = [
        (first + n + to_index, int(answer.draft_ids[first + n]), row_of[target])
        for target, first, end in merges
        if target in row_of
        for n in range(end - first)
    ]
    return np.array(pieces, np.int64).reshape(-1, 3)
