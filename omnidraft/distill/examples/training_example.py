"""A trace record as the learner reads it: draft ids, and what is asked of the drafter at which of them.

Shapes: T draft ids of prompt and answer, P positions where an emitted target token begins at a draft boundary,
M draft pieces of emitted n-grams, N rejected tokens. `at` is the index of the draft id whose hidden state predicts.
The end of the text is asked for at the last boundary. Special ids inside the text are predicted, and read where the
drafter has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.config import AlmSettings
from omnidraft.distill.examples.acceptance_labels import AcceptanceExamples, acceptance_examples, rejected_tokens
from omnidraft.distill.examples.answer_alignment import AlignedAnswer, align_answer, require_inside
from omnidraft.distill.examples.buckets import (
    BucketTargets,
    Split,
    bucket_targets,
    direct_buckets,
    one_against_all,
)
from omnidraft.distill.examples.chunks import Chunker, RecordChunks
from omnidraft.traces.record import Rounds, TargetLogprobs, TraceRecord
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class Ngram:
    """Draft tokens that spell one emitted target token."""

    draft_ids: tuple[int, ...]
    target_id: int


@dataclass(frozen=True, slots=True)
class DistributionTargets:
    """What a record teaches beyond its ids when the target told its beliefs."""

    buckets: BucketTargets
    """Of the P positions."""
    direct: BucketTargets
    """Of the same, over the draft tokens that are target tokens."""
    is_direct_D: np.ndarray
    """bool; which draft ids are target tokens."""
    log_p_P: np.ndarray
    """float32; of the emitted target tokens."""
    rejected: BucketTargets
    """Of N drafted and refused tokens: their first draft token against all else."""
    rejected_row_N: np.ndarray
    """int64; row in P where each was refused."""
    chunks: RecordChunks


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """What one record teaches."""

    ids_T: np.ndarray
    """int64; prompt and answer in draft ids, the front of the prompt cut to fit the window."""
    at_P: np.ndarray
    """int64; positions of emitted target tokens."""
    emitted_P: np.ndarray
    """int64; the target ids emitted there."""
    draft_P: np.ndarray
    """int64; the draft ids that begin there, num_draft where the drafter has none."""
    is_draftable_P: np.ndarray  # bool
    distribution: DistributionTargets | None
    """None when the target told no log-probabilities."""
    piece_at_M: np.ndarray  # int64
    piece_ids_M: np.ndarray  # int64, the draft id that comes next there
    piece_row_M: np.ndarray  # int64, row in P of the target token that the piece belongs to
    ngrams: tuple[Ngram, ...]
    """For the n-gram cache; cut positions included."""
    guesses: AcceptanceExamples
    """For the acceptance head."""
    num_emitted: int
    skipped: Mapping[str, int]
    """Emitted tokens that are no position, by reason."""

    @property
    def buckets(self) -> BucketTargets | None:
        """Of the P positions; None when the target told no log-probabilities."""
        return self.distribution.buckets if self.distribution else None


class ExampleBuilder:
    """Reads records of one vocabulary pair."""

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

    def build(self, record: TraceRecord) -> TrainingExample:
        """
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
        target_P, at_P = answer.met.target_P[chosen], answer.met.draft_P[chosen] + to_index
        row_of = {int(target): row for row, target in enumerate(target_P)}
        merges = answer.merges()
        pieces_M3 = _pieces(answer, merges, row_of, to_index)
        draft_P = self._emitted_draft_ids(answer, target_P, answer.met.draft_P[chosen])
        return TrainingExample(
            ids_T=ids_T,
            at_P=at_P,
            emitted_P=answer.target_ids[target_P],
            draft_P=draft_P,
            is_draftable_P=draft_P < self._alignment.num_draft,
            distribution=self._distribution_targets(record.beliefs, record.rounds, answer, at_P, row_of)
            if record.beliefs
            else None,
            piece_at_M=pieces_M3[:, 0],
            piece_ids_M=pieces_M3[:, 1],
            piece_row_M=pieces_M3[:, 2],
            ngrams=tuple(
                Ngram(tuple(answer.draft_ids[first:end].tolist()), int(answer.target_ids[target]))
                for target, first, end in merges
            ),
            guesses=acceptance_examples(record, target_P - answer.num_before, at_P, self._alignment.draft_first_T),
            num_emitted=len(record.emitted_ids),
            skipped=skipped,
        )

    def _emitted_draft_ids(self, answer: AlignedAnswer, target_P: np.ndarray, draft_P: np.ndarray) -> np.ndarray:
        """The draft token that begins at each position; of a special id its partner."""
        partner_P = self._alignment.draft_first_T[answer.target_ids[target_P]]
        next_P = np.append(answer.draft_ids, self._alignment.num_draft)[draft_P]
        return np.where(answer.target_lengths[target_P] > 0, next_P, partner_P)

    def _distribution_targets(
        self,
        beliefs: TargetLogprobs,
        rounds: Rounds,
        answer: AlignedAnswer,
        at_P: np.ndarray,
        row_of: Mapping[int, int],
    ) -> DistributionTargets:
        emitted_P = np.array(list(row_of), np.int64) - answer.num_before
        buckets = bucket_targets(beliefs, emitted_P, self._alignment, _splits(beliefs, answer, row_of))
        rejected_N2 = self._rejected(rounds, answer.num_before, row_of)
        has_bytes_E = self._target.num_bytes[answer.target_ids[answer.num_before :]] > 0
        return DistributionTargets(
            buckets=buckets,
            direct=direct_buckets(beliefs, emitted_P, self._alignment),
            is_direct_D=self._alignment.is_direct_D,
            log_p_P=beliefs.emitted_log_p_E[emitted_P].astype(np.float32).clip(max=0.0),
            rejected=one_against_all(buckets, rejected_N2[:, 0], rejected_N2[:, 1]),
            rejected_row_N=rejected_N2[:, 0],
            chunks=self._chunker.chunks(beliefs, at_P, emitted_P, has_bytes_E),
        )

    def _rejected(self, rounds: Rounds, num_before: int, row_of: Mapping[int, int]) -> np.ndarray:
        """int64 [N, 2]: row in P, and the first draft id of a token refused there; each once."""
        first_T = np.append(self._alignment.draft_first_T, self._alignment.num_draft)
        found = {
            (row_of[emitted + num_before], int(first_T[min(target, self._alignment.num_target)]))
            for emitted, target in rejected_tokens(rounds).tolist()
            if emitted + num_before in row_of
        }
        known = sorted(pair for pair in found if pair[1] < self._alignment.num_draft)
        return np.array(known, np.int64).reshape(-1, 2)


def _splits(beliefs: TargetLogprobs, answer: AlignedAnswer, row_of: Mapping[int, int]) -> list[Split]:
    log_p_E = beliefs.emitted_log_p_E.astype(np.float64)
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
    """[M, 3]: at, draft id that comes next, row of the position."""
    pieces = [
        (first + n + to_index, int(answer.draft_ids[first + n]), row_of[target])
        for target, first, end in merges
        if target in row_of
        for n in range(end - first)
    ]
    return np.array(pieces, np.int64).reshape(-1, 3)
