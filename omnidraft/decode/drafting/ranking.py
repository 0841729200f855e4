"""Ranks the drafter's next target tokens, each with the draft token to continue from.

The next target id t is ranked by log q(t) / T + w G(t), where q(t) sums over the draft tokens whose first target token
is t and G is the target's own noise at that position (docs/algorithms.md section 4). Only the drafter's most probable
tokens take part: the others together could move no rank that matters.
Shapes: D the drafter's vocabulary, K its most probable tokens, M their different first target tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnidraft.ports import Noise
from omnidraft.vocab.alignment import Alignment

_NUM_RANKED = 128


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
    """q at the request's temperature."""


class CandidateRanker:
    """The drafter's next target tokens after one prefix."""

    def __init__(self, logits_D: torch.Tensor, alignment: Alignment, temperature: float) -> None:
        top_K = torch.topk(logits_D, min(_NUM_RANKED, len(logits_D)))
        q_K = torch.exp(top_K.values - torch.logsumexp(logits_D, 0)).double().cpu().numpy()
        ids_K = top_K.indices.cpu().numpy()
        is_known = (ids_K < alignment.num_draft) & (q_K > 0)
        is_known[is_known] = alignment.first_D[ids_K[is_known]] < alignment.num_target
        self._draft_ids, self._draft_q = ids_K[is_known], q_K[is_known]
        self._ids_M, self._first_M, group_K = np.unique(
            alignment.first_D[self._draft_ids], return_index=True, return_inverse=True
        )
        self._q_M = np.bincount(group_K, weights=self._draft_q, minlength=len(self._ids_M))
        self._temperature = temperature

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

    def first_ids(self, weights: Sequence[float], noise: Noise, position: int) -> list[int | None]:
        """Return for each weight of the noise the target id that it ranks first; None when there is nothing to rank."""
        if not len(self._ids_M):
            return [None] * len(weights)
        return [int(self._ids_M[self._scores(weight, noise, position).argmax()]) for weight in weights]

    def _scores(self, weight: float, noise: Noise, position: int) -> np.ndarray:
        """Return the ranking score of each candidate. [M]"""
        log_q_M = np.log(self._q_M)
        if not (self._temperature and weight):
            return log_q_M
        gumbel_M = -np.log(noise.exponentials(position, self._ids_M))
        scores_M: np.ndarray = log_q_M / self._temperature + weight * gumbel_M
        return scores_M

    def _confidence(self) -> np.ndarray:
        """Return q at the request's temperature. [M]"""
        if not self._temperature or not len(self._q_M):
            return self._q_M
        sharpened_M = np.exp((np.log(self._q_M) - np.log(self._q_M).max()) / self._temperature)
        confidence_M: np.ndarray = sharpened_M / sharpened_M.sum()
        return confidence_M
