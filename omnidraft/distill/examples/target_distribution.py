"""What the target would draw, from what a trace record keeps of it: the request's own distribution at its positions.

Shapes: E emitted tokens, K log-probabilities kept. Letters: p is the target's raw distribution, x the shaped one.
Temperature, top-k, top-p and min-p are shaped in as decode/sampling/logits_pipeline.py does. Penalties, bias and
grammars are not: a record says that they were there (`is_drawn_from_logprobs`), not what they did.
Where temperature meets the tail, the tail's tokens count as equally likely as the last one kept; a cut of top-p or
min-p that falls behind the tokens kept leaves the tail whole.
"""

from dataclasses import dataclass

import numpy as np

from omnidraft.traces.record import TargetLogprobs


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """At each emitted position."""

    ids_EK: np.ndarray  # int64, the most probable tokens
    x_EK: np.ndarray  # float64, the chance that each is drawn
    other_E: np.ndarray  # float64, what any single other token can have at most


def target_distribution(
    beliefs: TargetLogprobs, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None = None
) -> TargetDistribution:
    """
    Args:
        temperature: above 0; at 0 one token is drawn for certain.
    """
    log_p_EK = beliefs.top_log_p_EK.astype(np.float64)
    least_E = log_p_EK[:, -1]
    weights_EK = np.exp(log_p_EK / temperature)
    tail_E = np.exp(beliefs.tail_log_p_E.astype(np.float64) + least_E * (1 / temperature - 1))
    if top_k is not None and top_k <= log_p_EK.shape[1]:
        weights_EK[:, top_k:], tail_E = 0.0, np.zeros_like(tail_E)
    if top_p is not None:
        front_E1 = top_p * (weights_EK.sum(axis=1) + tail_E)[:, None]
        mass_EK = np.cumsum(weights_EK, axis=1)
        weights_EK = np.where(mass_EK - weights_EK < front_E1, weights_EK, 0.0)
        tail_E = np.where(mass_EK[:, -1] < front_E1[:, 0], tail_E, 0.0)
    if min_p is not None:
        least_allowed_E = min_p * weights_EK[:, 0]
        weights_EK = np.where(weights_EK >= least_allowed_E[:, None], weights_EK, 0.0)
        tail_E = np.where(np.exp(least_E / temperature) >= least_allowed_E, tail_E, 0.0)
    total_E = weights_EK.sum(axis=1) + tail_E
    other_E = np.minimum(tail_E, np.exp(least_E / temperature)) / total_E
    return TargetDistribution(beliefs.top_ids_EK.astype(np.int64), weights_EK / total_E[:, None], other_E)
