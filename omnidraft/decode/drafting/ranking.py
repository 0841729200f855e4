"""Ranks the drafter's next target tokens, each with the draft token to continue from.

The next target id t is ranked by log q(t) / T + w G(t), where q(t) sums over the draft tokens whose first target token
is t and G is the target's own noise at that position (docs/algorithms.md section 4). Only the drafter's most probable
tokens take part: the others together could move no rank that matters. A token that top-k, top-p or min-p of q leave out
ranks as if it were a hundred times less probable, no lower: it may be among those that are left of p.
Shapes: D the drafter's vocabulary, K its most probable tokens, M their different first target tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnidraft.decode.drafting.constraints import DraftConstraints
from omnidraft.ports import Noise, Sampling
from omnidraft.vocab.alignment import Alignment

_NUM_RANKED = 128
_SPANS = (6.0, 9.0, 12.0)
"""The most probable tokens are sought among the logits that are so close to the largest one, where those are enough."""


_LOG_OUTSIDE = math.log(0.01)
"""Added to log q of a token outside the truncated q."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target token that the drafter proposes."""

    target_id: int
    draft_id: int
    """The most probable draft token that begins with it."""
    q: float
    """The drafter's probability of the target token."""
    draft_share: float
    """Share of q that this draft token has."""
    confidence: float
    """q at the request's temperature and truncation."""

    def with_share(self, share: float) -> "Candidate":
        """Return the candidate of a distribution that has this share of another."""
        return self if share == 1.0 else replace(self, q=self.q * share, confidence=self.confidence * share)


class CandidateRanker:
    """The drafter's next target tokens after one prefix."""

    def __init__(self, logits_D: np.ndarray, alignment: Alignment, sampling: Sampling) -> None:
        ids_K, q_K = most_probable(logits_D)
        is_known = (ids_K < alignment.num_draft) & (q_K > 0)
        is_known[is_known] = alignment.first_D[ids_K[is_known]] < alignment.num_target
        self._draft_ids, self._draft_q = ids_K[is_known], q_K[is_known]
        self._ids_M, self._first_M, group_K = np.unique(
            alignment.first_D[self._draft_ids], return_index=True, return_inverse=True
        )
        self._q_M = np.bincount(group_K, weights=self._draft_q, minlength=len(self._ids_M))
        self._alignment = alignment
        self._temperature = sampling.temperature
        self._log_q_M = self._truncated(np.log(self._q_M), sampling)

    def best(self, num: int, weight: float, noise: Noise, position: int) -> list[Candidate]:
        """Return at most `num` candidates, best first."""
        order = np.argsort(-self._scores(weight, noise, position), kind="stable")[:num]
        confidence_M = self._confidence()
        return [
            Candidate(
                target_id=int(self._ids_M[at]),
                draft_id=int(self._draft_ids[self._first_M[at]]),
                q=float(self._q_M[at]),
                draft_share=float(self._draft_q[self._first_M[at]] / self._q_M[at]),
                confidence=float(confidence_M[at]),
            )
            for at in order
        ]

    def continued(self, candidate: Candidate, constraints: DraftConstraints, path: Sequence[int]) -> Candidate:
        """Return the candidate with the most probable draft token that the target can spell to its end after the path,
        since later pieces of others may be forbidden; as it is where there is none."""
        for number in np.flatnonzero(self._alignment.first_D[self._draft_ids] == candidate.target_id):
            draft_id, share = int(self._draft_ids[number]), float(self._draft_q[number] / candidate.q)
            pieces = self._alignment.pieces(draft_id)
            if len(pieces) == 1 or constraints.allows_all(path, pieces):
                return replace(candidate, draft_id=draft_id, draft_share=share)
        return candidate

    def first_ids(self, weights: Sequence[float], noise: Noise, position: int) -> list[int | None]:
        """Return for each weight of the noise the target id that it ranks first; None when there is nothing to rank."""
        if not len(self._ids_M):
            return [None] * len(weights)
        return [int(self._ids_M[self._scores(weight, noise, position).argmax()]) for weight in weights]

    def _scores(self, weight: float, noise: Noise, position: int) -> np.ndarray:
        """Return the ranking score of each candidate. [M]"""
        if not (self._temperature and weight):
            return self._log_q_M
        gumbel_M = -np.log(noise.exponentials(position, self._ids_M))
        scores_M: np.ndarray = self._log_q_M + weight * gumbel_M
        return scores_M

    def _confidence(self) -> np.ndarray:
        """Return q at the request's temperature and truncation. [M]"""
        if not self._temperature or not len(self._q_M):
            return self._q_M
        sharpened_M = np.exp(self._log_q_M - self._log_q_M.max())
        confidence_M: np.ndarray = sharpened_M / sharpened_M.sum()
        return confidence_M

    def _truncated(self, log_q_M: np.ndarray, sampling: Sampling) -> np.ndarray:
        """Return log q at the request's temperature, lower for the tokens that truncation would leave out."""
        if not sampling.temperature or not len(log_q_M):
            return log_q_M
        with np.errstate(over="ignore"):  # the least temperatures leave the likeliest token alone
            log_q_M = (log_q_M - log_q_M.max()) / sampling.temperature
        q_M = np.exp(log_q_M - log_q_M.max())
        order = np.argsort(-q_M, kind="stable")
        is_inside = np.ones(len(order), bool)
        if sampling.top_k is not None:
            is_inside[order[sampling.top_k :]] = False
        if sampling.top_p is not None:
            mass_before = np.cumsum(q_M[order]) - q_M[order]
            is_inside[order[mass_before >= sampling.top_p * q_M[is_inside].sum()]] = False
        if sampling.min_p is not None:
            is_inside &= q_M >= sampling.min_p
        return np.where(is_inside, log_q_M, log_q_M + _LOG_OUTSIDE)


def most_probable(logits_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the most probable tokens, best first, equal ones by id, and their probabilities (float64);
    none whose logit is -inf. [K]

    In numpy, because torch would wake its threads for each of these short steps, which costs more than the steps.
    """
    num = min(_NUM_RANKED, len(logits_D))
    max_logit = logits_D.max()
    if max_logit == -np.inf:
        return np.empty(0, np.int64), np.empty(0)
    for span in _SPANS:
        ids = np.flatnonzero(logits_D > max_logit - span)
        if len(ids) >= num:
            break
    else:
        ids = np.flatnonzero(logits_D > -np.inf)
    if len(ids) > num:
        threshold = np.partition(logits_D[ids], len(ids) - num)[len(ids) - num]
        ids = ids[logits_D[ids] >= threshold]
    ids_K = ids[np.argsort(-logits_D[ids], kind="stable")[:num]]
    p_D = logits_D - max_logit
    np.exp(p_D, out=p_D)
    return ids_K, p_D[ids_K].astype(np.float64) / p_D.sum()
