"""Shape the target's distribution as the request asks: temperature, top-k, top-p, in this order.

Works on one row of raw logits and returns only what can be drawn. Sorts are stable: probability down, id up.
Shapes: V vocabulary, M ids left.
"""

import numpy as np

from omnidraft.ports import Sampling

_NUCLEUS_GUESS = 1024


def shape(logits_V: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Ids and float64 probabilities, summing to 1, none of them 0. Temperature 0: the most probable id alone."""
    if sampling.temperature == 0:
        return np.array([logits_V.argmax()]), np.ones(1)
    p_V = np.exp((logits_V.astype(np.float64) - logits_V.max()) / sampling.temperature)
    p_V /= p_V.sum()
    ids = np.flatnonzero(p_V)
    if sampling.top_k is not None:
        ids = _most_probable(p_V, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        ids = _nucleus(p_V, ids, sampling.top_p)
    p_M = p_V[ids]
    return ids, p_M / p_M.sum()


def _most_probable(p_V: np.ndarray, num_ids: int) -> np.ndarray:
    """The first `num_ids` ids of the stable order, in that order, without sorting the vocabulary."""
    if num_ids < len(p_V):
        threshold = np.partition(p_V, len(p_V) - num_ids)[len(p_V) - num_ids]
        ids = np.flatnonzero(p_V >= threshold)
    else:
        ids = np.arange(len(p_V))
    ids = ids[np.argsort(-p_V[ids], kind="stable")][:num_ids]
    return ids[p_V[ids] > 0]


def _nucleus(p_V: np.ndarray, ids: np.ndarray, top_p: float) -> np.ndarray:
    """The shortest front of the stable order that holds `top_p` of the mass of `ids`."""
    allowed_V = np.zeros_like(p_V)
    allowed_V[ids] = p_V[ids] / p_V[ids].sum()
    for num_ids in (_NUCLEUS_GUESS, len(p_V)):
        front = _most_probable(allowed_V, num_ids)
        mass = np.cumsum(allowed_V[front])
        if mass[-1] >= top_p or num_ids >= len(p_V):
            break
    return front[: int(np.searchsorted(mass, top_p)) + 1]
