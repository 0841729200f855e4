"""Ranks the drafter's next target tokens, each with the draft token to continue from.

The next target id t is ranked by log q(t) / T + w G(t), where q(t) sums over the draft tokens whose first target token
is t and G is the target's own noise at that position (docs/algorithms.md section 4). Only the drafter's most probable
tokens take part: the others together could move no rank that matters. A token that top-k, top-p or min-p of q leave out
ranks as if it were a hundred times less probable, no lower: it may be among those that are left of p.
Shapes: D the drafter's vocabulary, K its most probable tokens, M their different first target tokens.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from omnidraft.decode.drafting.constraints import DraftConstraints
from omnidraft.ports import Noise, RankedTokens, Sampling
from omnidraft.vocab.alignment import Alignment

_NUM_RANKED = 128
_LOG_OUTSIDE = math.log(0.01)
"""Added to log q of a token outside the truncated q."""


class Candidate(NamedTuple):
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
        return self if share == 1.0 else self._replace(q=self.q * share, confidence=self.confidence * share)


class CandidateRanker:
    """The drafter's next target tokens after one prefix."""

    def __init__(self, ranked: RankedTokens, alignment: Alignment, sampling: Sampling) -> None:
        self._ranked, self._alignment = ranked, alignment
        self._temperature = sampling.temperature
        if self._temperature:
            self._log_q_M = _truncated(np.log(ranked.target_q_M), sampling)

    def best(self, num: int, weight: float, noise: Noise, position: int) -> list[Candidate]:
        """Return at most `num` candidates, best first."""
        ranked, confidence_M = self._ranked, self._ranked.target_q_M
        order: Sequence[int] = range(len(confidence_M))
        if self._temperature:
            order = np.argsort(-self._scores(weight, noise, position), kind="stable")[:num].tolist()
            confidence_M = self._confidence()
        candidates = []
        for at in order[:num]:
            first, q = ranked.first_M[at], float(ranked.target_q_M[at])
            share = float(ranked.draft_q_K[first]) / q
            ids = int(ranked.target_ids_M[at]), int(ranked.draft_ids_K[first])
            candidates.append(Candidate(*ids, q, share, float(confidence_M[at])))
        return candidates

    def continued(self, candidate: Candidate, constraints: DraftConstraints, path: Sequence[int]) -> Candidate:
        """Return the candidate with the most probable draft token that the target can spell to its end after the path,
        since later pieces of others may be forbidden; as it is where there is none."""
        ids_K, q_K = self._ranked.draft_ids_K, self._ranked.draft_q_K
        for number in np.flatnonzero(self._alignment.first_D[ids_K] == candidate.target_id):
            draft_id, share = int(ids_K[number]), float(q_K[number] / candidate.q)
            pieces = self._alignment.pieces(draft_id)
            if len(pieces) == 1 or constraints.allows_all(path, pieces):
                return candidate._replace(draft_id=draft_id, draft_share=share)
        return candidate

    def first_ids(self, weights: Sequence[float], noise: Noise, position: int) -> list[int | None]:
        """Return for each weight of the noise the target id that it ranks first; None when there is nothing to rank."""
        ids_M = self._ranked.target_ids_M
        if not len(ids_M):
            return [None] * len(weights)
        return [int(ids_M[self._scores(weight, noise, position).argmax()]) for weight in weights]

    def _scores(self, weight: float, noise: Noise, position: int) -> np.ndarray:
        """Return the ranking score of each candidate. [M]"""
        if not weight:
            return self._log_q_M
        gumbel_M = -np.log(noise.exponentials(position, self._ranked.target_ids_M))
        scores_M: np.ndarray = self._log_q_M + weight * gumbel_M
        return scores_M

    def _confidence(self) -> np.ndarray:
        """Return q at the request's temperature and truncation. [M]"""
        if not len(self._log_q_M):
            return self._log_q_M
        sharpened_M = np.exp(self._log_q_M - self._log_q_M.max())
        confidence_M: np.ndarray = sharpened_M / sharpened_M.sum()
        return confidence_M


def _truncated(log_q_M: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return log q at the request's temperature, lower for the tokens that truncation would leave out."""
    if not len(log_q_M):
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


def rank_tokens(logits_D: np.ndarray, alignment: Alignment) -> RankedTokens:
    """Implement ports.RankTokens where no kernels do.

    In numpy, because torch would wake its threads for each of these short steps, which costs more than the steps.
    """
    max_logit = float(logits_D.max())
    ids_K = np.empty(0, np.int64)
    if math.isfinite(max_logit):
        num = min(_NUM_RANKED, len(logits_D))
        threshold = np.partition(logits_D, len(logits_D) - num)[len(logits_D) - num]
        ids = np.flatnonzero((logits_D >= threshold) & (logits_D > -np.inf))
        ids_K = ids[np.argsort(-logits_D[ids], kind="stable")[:num]]
        q_D = np.exp(logits_D - max_logit)
        q_K = q_D[ids_K].astype(np.float64) / q_D.sum()
        is_known = (ids_K < alignment.num_draft) & (q_K > 0)
        is_known[is_known] = alignment.first_D[ids_K[is_known]] < alignment.num_target
        ids_K, q_K = ids_K[is_known], q_K[is_known]
    else:
        q_K = np.empty(0)
    targets, first, group_K = np.unique(alignment.first_D[ids_K], return_index=True, return_inverse=True)
    q_M = np.bincount(group_K, weights=q_K, minlength=len(targets))
    order = np.argsort(-q_M, kind="stable")
    return RankedTokens(max_logit, ids_K, q_K, targets[order], first[order], q_M[order])
