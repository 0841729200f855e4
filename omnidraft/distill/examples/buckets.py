"""What the target believes at some positions, in draft tokens, and what the drafter gives the same tokens.

Shapes: N positions, V the drafter's vocabulary, S buckets of single draft tokens at one position, B = S + 1 with the
rest bucket last. Letters: p is the target's distribution and P its mass per bucket, q and Q the drafter's.
A bucket is one draft token, and all other draft tokens are the rest bucket.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_P_FLOOR = -14.0
"""No bucket is believed to be less likely: the log-probabilities of a trace have 11 bits."""
_OUT = -1e30  # finite, so that a row whose buckets are the whole vocabulary has no NaN in its gradient


@dataclass(frozen=True, slots=True)
class Buckets:
    """What the target believes at N positions, in draft tokens; rows are padded to the widest."""

    ids_NS: Tensor
    """int64; a padded place repeats an id of its row."""
    log_p_NS: Tensor
    """float32, -inf where the mass is zero."""
    real_NS: Tensor
    """bool, False at padding."""
    log_p_rest_N: Tensor
    """float32, -inf when nothing is outside."""
    emitted_N: Tensor
    """int64; the draft token that came next, or an id that the drafter has not."""
    rest_V: Tensor | None = None
    """bool; draft tokens that may be in the rest, the others belong nowhere; None: all."""

    def __getitem__(self, rows: slice | Tensor) -> "Buckets":
        return Buckets(
            self.ids_NS[rows],
            self.log_p_NS[rows],
            self.real_NS[rows],
            self.log_p_rest_N[rows],
            self.emitted_N[rows],
            self.rest_V,
        )


def both_sides(logits_NV: Tensor, buckets: Buckets) -> tuple[Tensor, Tensor]:
    """log P and log Q [N, B], the rest bucket last; at padding both are 0, which no divergence counts."""
    log_q_NS, log_q_rest_N = log_q(logits_NV, buckets)
    padding_NS = ~buckets.real_NS
    log_p_NS, log_q_NS = buckets.log_p_NS.masked_fill(padding_NS, 0.0), log_q_NS.masked_fill(padding_NS, 0.0)
    return (
        torch.cat([log_p_NS, buckets.log_p_rest_N[:, None]], dim=1),
        torch.cat([log_q_NS, log_q_rest_N[:, None]], dim=1),
    )


def log_q(logits_NV: Tensor, buckets: Buckets) -> tuple[Tensor, Tensor]:
    """log Q of every bucket and of the rest, float32.

    The rest is a logsumexp over what is outside, never 1 minus a sum: it stays exact when it is tiny.
    """
    logits_NV = logits_NV.float()
    logits_NS = logits_NV.gather(1, buckets.ids_NS)
    inside_N = logits_NS.masked_fill(~buckets.real_NS, _OUT).logsumexp(dim=-1)
    outside_NV = logits_NV.scatter(1, buckets.ids_NS, _OUT)
    if buckets.rest_V is not None:
        outside_NV = outside_NV[:, : len(buckets.rest_V)].masked_fill(~buckets.rest_V, _OUT)
    outside_N = outside_NV.logsumexp(dim=-1)
    all_N = torch.logaddexp(inside_N, outside_N)
    return logits_NS - all_N[:, None], outside_N - all_N
