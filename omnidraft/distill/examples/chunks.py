"""Chunks of one record: stretches of text that both tokenisations close, and how likely the target finds them.

Shapes: P places where an emitted target token begins at a draft boundary, C chunks, E emitted target tokens, K kept,
D and T ids of the drafter and of the target.
A chunk runs from one place to the next at which a word probably starts, else over it. The target's probability for
that is the sum over the tokens that the trace kept: a lower bound, short by at most the tail. A chunk ends before a
special id, whatever its probability, and what follows the last end is left out.
Source: https://arxiv.org/abs/2503.20083, section 3, and its code's `merge_by_space_prob+append_space`.
"""

from dataclasses import dataclass

import numpy as np

from omnidraft.config import AlmSettings
from omnidraft.distill.examples.buckets import LOG_P_FLOOR
from omnidraft.traces.record import TargetLogprobs
from omnidraft.vocab.tokenizer import Vocabulary

MAX_CHUNK_IDS = 64
"""Draft tokens of a chunk; a longer one is closed where it is, so that few rows of logits belong together."""
_WHITE = b" \t\r\n"
_LOWEST = -1e4  # of a token, so that a sum has no infinity


@dataclass(frozen=True, slots=True)
class RecordChunks:
    """alm.Chunks of one record, as arrays; the ids are those of the record."""

    at_C: np.ndarray
    """int64; the draft id before the first of the chunk."""
    num_ids_C: np.ndarray  # int64
    log_p_C: np.ndarray  # float32
    tau: float
    starts_D: np.ndarray | None  # bool; None when the boundary after a chunk does not count


class Chunker:
    """Cuts records of one vocabulary pair."""

    def __init__(self, settings: AlmSettings, draft: Vocabulary, target: Vocabulary) -> None:
        self._settings = settings
        self._starts_D = word_starts(draft)
        self._starts_T = np.append(word_starts(target), False)  # the last for ids outside the vocabulary

    def chunks(
        self, beliefs: TargetLogprobs, at_P: np.ndarray, emitted_P: np.ndarray, has_bytes_E: np.ndarray
    ) -> RecordChunks:
        """
        Args:
            at_P: of each place, the draft id before it.
            emitted_P: of each place, the index of the emitted token that begins there.
        """
        mass_P = self._boundary_mass(beliefs, emitted_P)
        num_special_E1 = np.concatenate([[0], np.cumsum(~has_bytes_E)])
        is_text_P = np.append(np.diff(num_special_E1[emitted_P]) == 0, False)  # from this place to the next
        closes_P = mass_P > self._settings.merge_below if self._settings.merge_below else np.ones(len(at_P), bool)
        spans_C2 = _spans(at_P, closes_P, is_text_P)
        first_C, end_C = spans_C2[:, 0], spans_C2[:, 1]
        log_p_E1 = np.concatenate([[0.0], np.cumsum(beliefs.emitted_log_p_E.astype(np.float64).clip(_LOWEST, 0.0))])
        log_p_C = log_p_E1[emitted_P[end_C]] - log_p_E1[emitted_P[first_C]]
        if self._settings.debias:
            log_p_C += np.log(mass_P[end_C].clip(np.exp(LOG_P_FLOOR), 1.0))
        starts_D = self._starts_D if self._settings.debias else None
        num_ids_C = at_P[end_C] - at_P[first_C]
        return RecordChunks(at_P[first_C], num_ids_C, log_p_C.astype(np.float32), self._settings.tau, starts_D)

    def _boundary_mass(self, beliefs: TargetLogprobs, emitted_P: np.ndarray) -> np.ndarray:
        """Probability that a word starts at each place, as far as the kept tokens say."""
        top_PK = np.minimum(beliefs.top_ids_EK[emitted_P].astype(np.int64), len(self._starts_T) - 1)
        p_PK = np.exp(beliefs.top_log_p_EK[emitted_P].astype(np.float64))
        return np.where(self._starts_T[top_PK], p_PK, 0.0).sum(axis=1)


def word_starts(vocabulary: Vocabulary) -> np.ndarray:
    """bool per id: it begins with white space or is special, so that no token reaches from before into its text."""
    starts = np.fromiter((spelled[:1] in _WHITE for spelled in vocabulary.token_bytes), bool, len(vocabulary))
    starts &= vocabulary.num_bytes > 0  # b"" is in every bytes
    starts[sorted(vocabulary.special_ids)] = True
    return starts


def _spans(at_P: np.ndarray, closes_P: np.ndarray, is_text_P: np.ndarray) -> np.ndarray:
    """int64 [C, 2]: places at which a chunk begins and ends."""
    spans = []
    first = 0
    for end in range(1, len(at_P)):
        if not is_text_P[end - 1] or at_P[end] - at_P[end - 1] > MAX_CHUNK_IDS:
            first = end
            continue
        is_cut = end + 1 < len(at_P) and (not is_text_P[end] or at_P[end + 1] - at_P[first] > MAX_CHUNK_IDS)
        if closes_P[end] or is_cut:
            spans.append((first, end))
            first = end
    return np.array(spans, np.int64).reshape(-1, 2)
