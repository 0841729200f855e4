"""Losses at single positions: pure functions, logits in, one number per position out.

The learner decides which positions count, and takes their mean.
Shapes: N positions, V the drafter's vocabulary, S buckets, B = S + 1 with the rest bucket last. Letters: p is the
target's distribution and P its mass per bucket, q and Q the drafter's. No gradient flows through P.
Source: docs/algorithms.md, section 6; where no other is named, OmniDraft, https://arxiv.org/abs/2507.02659, section
4.2, over the buckets of buckets.py instead of its renormalised intersection.
"""

import torch
from torch import Tensor

from omnidraft.distill.examples.targets import LOG_P_FLOOR, BucketTargets
from omnidraft.distill.training.picked_logits import OUT, picked_and_rest


def forward_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return sum P log(P / Q), which wants mass wherever the target has some. 0 when Q equals P."""
    log_p_NB, log_q_NB = both_sides(logits_NV, buckets)
    return (log_p_NB.exp() * (log_p_NB.clamp_min(LOG_P_FLOOR) - log_q_NB)).sum(dim=-1)


def reverse_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return sum Q log(Q / P), the paper's direction, which takes mass away where the target has none.

    0 when Q equals P.
    """
    log_p_NB, log_q_NB = both_sides(logits_NV, buckets)
    return (log_q_NB.exp() * (log_q_NB - log_p_NB.clamp_min(LOG_P_FLOOR))).sum(dim=-1)


def paper_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return OmniDraft's own L_DM: reverse KL of p and q, both renormalised on the draft tokens that are target tokens.

    The trace has p of a few of these; all others are the rest bucket, whose P is the trace's tail, an upper bound.

    Args:
        buckets: direct tokens alone, P renormalised over them, and `rest_V` the direct tokens.
    """
    return reverse_kl(logits_NV, buckets)


def total_variation(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return 1 - sum min(P, Q), the probability that a ratio test rejects a draft token. Range [0, 1].

    Source: Leviathan et al., https://arxiv.org/abs/2211.17192, section 3.
    """
    log_p_NB, log_q_NB = both_sides(logits_NV, buckets)
    return (log_q_NB.exp() - log_p_NB.exp()).relu().sum(dim=-1)


def emitted_nll(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return -log q of the draft token that came next. 0 when q is certain of it. Needs no p."""
    logits_N1, others_N = picked_and_rest(logits_NV, buckets.ids_NS[:, :1])
    return torch.logaddexp(logits_N1[:, 0], others_N) - logits_N1[:, 0]


def both_sides(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log P and log Q [N, B], the rest bucket last; at padding both are 0, which no divergence counts."""
    log_q_NS, log_q_rest_N = log_q(logits_NV, buckets)
    padding_NS = ~buckets.real_NS
    log_p_NS, log_q_NS = buckets.log_p_NS.masked_fill(padding_NS, 0.0), log_q_NS.masked_fill(padding_NS, 0.0)
    return (
        torch.cat([log_p_NS, buckets.log_p_rest_N[:, None]], dim=1),
        torch.cat([log_q_NS, log_q_rest_N[:, None]], dim=1),
    )


def log_q(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log Q of every bucket [N, S] and of the rest [N], float32.

    The rest is a logsumexp over what is outside, never 1 minus a sum: it stays exact when it is tiny.
    """
    logits_NS, outside_N = picked_and_rest(logits_NV, buckets.ids_NS, buckets.rest_V)
    inside_N = logits_NS.masked_fill(~buckets.real_NS, OUT).logsumexp(dim=-1)
    all_N = torch.logaddexp(inside_N, outside_N)
    return logits_NS - all_N[:, None], outside_N - all_N
