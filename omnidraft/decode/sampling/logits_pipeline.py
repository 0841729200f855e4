"""Shape the target's distribution as the request asks: penalties, bias, grammar, temperature, top-k, top-p, min-p.

In this order, on one row of raw logits, for the nodes that the target's draws visit and no others. What can be drawn
is all that is returned. Sorts are stable: probability down, id up.
Shapes: V vocabulary, M ids left.
"""

import math
from typing import Protocol

import numpy as np
import torch

from omnidraft.decode.sampling.penalties import Bias, Penalties
from omnidraft.errors import ContractError
from omnidraft.ports import Request, Sampling

_NUCLEUS_GUESS = 1024


class Processor(Protocol):
    """What changes the logits of one text before temperature; holds that text's history."""

    def apply(self, logits_V: np.ndarray) -> None:
        """Change float64 logits in place, for the draw after all tokens taken.

        Raises:
            RequestError: no token is left.
        """

    def take(self, token: int) -> None:
        """The target drew this token."""


class LogitsPipeline:
    """Shapes the draws of one text. It follows the draws in order, so that the history of each is the prompt, all that
    was emitted before, and its own node's path: nothing that was only drafted."""

    def __init__(self, request: Request, grammar: Processor | None = None) -> None:
        self._sampling = request.sampling
        processors: list[Processor] = []
        if Penalties.are_needed(request.sampling):
            processors.append(Penalties(request))
        if request.sampling.logit_bias:
            processors.append(Bias(request.sampling))
        if grammar is not None:
            processors.append(grammar)
        self._processors = tuple(processors)

    def shape(self, logits_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and probabilities of the next draw, as the function `shape`.

        Raises:
            RequestError: no token is left.
            ContractError: see `shape`; processors hide nothing of what the target gave.
        """
        if self._processors:
            _require_finite(logits_V.max())
            logits_V = logits_V.astype(np.float64)
        for processor in self._processors:
            processor.apply(logits_V)
        return shape(logits_V, self._sampling)

    def take(self, token: int) -> None:
        """The target drew this token from what was shaped last."""
        for processor in self._processors:
            processor.take(token)


def shape(logits_V: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Ids and float64 probabilities, summing to 1, none of them 0. Temperature 0: the most probable id alone.

    Raises:
        ContractError: the largest logit is no finite number: one of them is NaN or +inf, or all are -inf.
    """
    if sampling.temperature == 0:
        best = logits_V.argmax()  # the first NaN, where there is one
        _require_finite(logits_V[best])
        return np.array([best]), np.ones(1)
    x_V = torch.from_numpy(logits_V).double()
    most = x_V.max()  # NaN, where there is one
    _require_finite(most.item())
    x_V -= most  # before the temperature, which may be tiny
    p_V = torch.softmax(x_V.div_(sampling.temperature), 0).numpy()
    ids = np.arange(len(p_V)) if p_V.all() else np.flatnonzero(p_V)
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return ids, p_V[ids] if len(ids) < len(p_V) else p_V
    if sampling.top_k is not None:
        ids = _most_probable(p_V, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        ids = _nucleus(p_V, ids, sampling.top_p)
    if sampling.min_p is not None:
        ids = ids[p_V[ids] >= sampling.min_p * p_V.max()]
    p_M = p_V[ids]
    return ids, p_M / p_M.sum()


def _require_finite(most: float) -> None:
    if not math.isfinite(most):
        raise ContractError(
            f"the target's largest logit is {most}: its weights or its computation are broken; see `omnidraft check`"
        )


def _most_probable(p_V: np.ndarray, num_ids: int) -> np.ndarray:
    """The first `num_ids` ids of the stable order, in that order, without sorting the vocabulary; none of them 0."""
    threshold = np.partition(p_V, len(p_V) - num_ids)[len(p_V) - num_ids] if num_ids < len(p_V) else 0.0
    ids = np.flatnonzero(p_V >= threshold) if threshold else np.flatnonzero(p_V)
    return ids[np.argsort(-p_V[ids], kind="stable")][:num_ids]


def _nucleus(p_V: np.ndarray, ids: np.ndarray, top_p: float) -> np.ndarray:
    """The shortest front of the stable order that holds `top_p` of the mass of `ids`."""
    total = p_V[ids].sum()
    ids = np.sort(ids)
    p_M = p_V[ids] / total
    for num_ids in (_NUCLEUS_GUESS, len(ids)):
        front = _most_probable(p_M, num_ids)
        mass = np.cumsum(p_M[front])
        if mass[-1] >= top_p or num_ids >= len(ids):
            break
    return ids[front[: int(np.searchsorted(mass, top_p)) + 1]]
