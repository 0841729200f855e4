"""Chunks of one record: stretches of text that both tokenisations close, with the target's likelihood of each.

Shapes: P positions where an emitted target token begins at a draft boundary, N chunks, E emitted target tokens, K
target tokens that the record holds per position, L draft ids of the longest chunk, D and T ids of the drafter and the
target. A chunk runs from one position to the next at which a word probably starts, else past it. The target's
probability for that is the sum over the tokens that the record holds: a lower bound, short by at most the tail. A chunk
ends before a special id, whatever its probability, and text behind the last end is left out.
Source: docs/algorithms.md, section 7; https://arxiv.org/abs/2503.20083, section 3, and its code's
`merge_by_space_prob+append_space`.
"""

from dataclasses import dataclass

import numpy as np

from omnidraft.distill.examples.targets import LOG_P_FLOOR, ChunkTargets, Positions
from omnidraft.traces.record import TargetLogprobs
from omnidraft.vocab.tokenizer import Vocabulary

MAX_CHUNK_IDS = 64
"""Draft tokens of a chunk; a longer one is closed early, so that few rows of logits belong together."""
_WHITE = b" \t\r\n"
_LOWEST = -1e4  # log-probability of a token, so that a sum has no infinity


@dataclass(frozen=True)
class AlmSettings:
    """Approximate likelihood matching: the loss `alm`. Defaults are its paper's."""

    tau: float = 100.0
    """Likelihoods are compared to the power 1 / tau; higher weighs unlikely chunks like likely ones."""
    debias: bool = True
    """Compare the text together with a word start after it, so that a vocabulary with longer tokens is not penalized.
    The target's probability of the word start is a lower bound, since the trace keeps top-k log-probabilities only."""
    merge_below: float = 0.1
    """Chunks grow until a word starts after them with more than this probability; 0 never merges."""


class Chunker:
    """Cuts records of one vocabulary pair into chunks."""

    def __init__(self, settings: AlmSettings, draft: Vocabulary, target: Vocabulary) -> None:
        self._settings = settings
        self._starts_D = word_starts(draft)
        self._starts_T = np.append(word_starts(target), False)  # the last for ids outside the vocabulary

    def chunks(
        self, logprobs: TargetLogprobs, positions: Positions, ids_T: np.ndarray, has_bytes_E: np.ndarray
    ) -> ChunkTargets[np.ndarray]:
        """Return the chunks of a record.

        Args:
            ids_T: prompt and answer in draft ids.
            has_bytes_E: False for special ids.
        """
        at_P, emitted_P = positions.at_P, positions.emitted_P
        mass_P = self._boundary_mass(logprobs, emitted_P)
        num_special_E1 = np.concatenate([[0], np.cumsum(~has_bytes_E)])
        is_text_P = np.append(np.diff(num_special_E1[emitted_P]) == 0, False)  # from this position to the next
        closes_P = mass_P > self._settings.merge_below if self._settings.merge_below else np.ones(len(at_P), bool)
        spans_N2 = chunk_spans(at_P, closes_P, is_text_P)
        first_N, end_N = spans_N2.T
        log_p_E1 = np.concatenate([[0.0], np.cumsum(logprobs.emitted_log_p_E.astype(np.float64).clip(_LOWEST, 0.0))])
        log_p_N = log_p_E1[emitted_P[end_N]] - log_p_E1[emitted_P[first_N]]
        if self._settings.debias:
            log_p_N += np.log(mass_P[end_N].clip(np.exp(LOG_P_FLOOR), 1.0))
        starts_D = self._starts_D if self._settings.debias else None
        return chunk_targets(ids_T, at_P, spans_N2, log_p_N, tau=self._settings.tau, starts_V=starts_D)

    def _boundary_mass(self, logprobs: TargetLogprobs, emitted_P: np.ndarray) -> np.ndarray:
        """Return the probability that a word starts at each position, as far as the record's tokens cover it."""
        top_PK = np.minimum(logprobs.top_ids_EK[emitted_P].astype(np.int64), len(self._starts_T) - 1)
        p_PK = np.exp(logprobs.top_log_p_EK[emitted_P].astype(np.float64))
        return np.where(self._starts_T[top_PK], p_PK, 0.0).sum(axis=1)


def chunk_targets(
    ids_T: np.ndarray,
    at_P: np.ndarray,
    spans_N2: np.ndarray,
    log_p_N: np.ndarray,
    *,
    tau: float,
    starts_V: np.ndarray | None,
) -> ChunkTargets[np.ndarray]:
    """Return the chunks between these positions of a text.

    Args:
        at_P: the index of the id whose hidden state predicts what follows each position.
        spans_N2: see chunk_spans.
        starts_V: see ChunkTargets.
    """
    row_N, end_N = at_P[spans_N2].T
    next_L = np.arange(1, (end_N - row_N).max(initial=1) + 1)
    return ChunkTargets(
        row_N=row_N,
        ids_NL=ids_T[np.minimum(row_N[:, None] + next_L, len(ids_T) - 1)],
        num_ids_N=end_N - row_N,
        log_p_N=log_p_N.astype(np.float32),
        tau=tau,
        starts_V=starts_V,
    )


def word_starts(vocabulary: Vocabulary) -> np.ndarray:
    """Return a bool per id: it begins with white space or is special, so that no token reaches into its text."""
    starts = np.fromiter((spelled[:1] in _WHITE for spelled in vocabulary.token_bytes), bool, len(vocabulary))
    starts &= vocabulary.num_bytes > 0  # b"" is in every bytes
    starts[sorted(vocabulary.special_ids)] = True
    return starts


def chunk_spans(at_P: np.ndarray, closes_P: np.ndarray, is_text_P: np.ndarray) -> np.ndarray:
    """Return the positions at which each chunk begins and ends, int64 [N, 2].

    Args:
        at_P: the number of draft ids before each position, or that number and a constant.
        closes_P: whether a chunk may end there.
        is_text_P: whether nothing but text lies between this position and the next.
    """
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
