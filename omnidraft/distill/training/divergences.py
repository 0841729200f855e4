"""Losses at single positions: pure functions, logits in, one number per position out.

The learner decides which positions count, and takes their mean.
Shapes: N positions, V the drafter's vocabulary, S buckets, B = S + 1 with the rest bucket last. Letters: p is the
target's distribution and P its mass per bucket, q and Q the drafter's. No gradient flows through P.
Source: docs/algorithms.md, section 6; where no other is named, OmniDraft, https://arxiv.org/abs/2507.02659, section
4.2, over the buckets of buckets.py instead of its renormalised intersection.
"""

import math

import torch
from torch import Tensor

from omnidraft.distill.examples.targets import LOG_P_FLOOR, BucketTargets, RankedTargets
from omnidraft.distill.training.picked_logits import OUT, picked_and_rest

LK_ETA = 3.0
"""Rate at which `lk` turns from KL to total variation as acceptance rises; the paper's."""


def forward_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return sum P log(P / Q), which wants mass wherever the target has some. 0 when Q equals P."""
    return _forward(*both_sides(logits_NV, buckets))


def reverse_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return sum Q log(Q / P), the paper's direction, which takes mass away where the target has none.

    0 when Q equals P.
    """
    return _reverse(*both_sides(logits_NV, buckets))


def mixed_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return half of each direction."""
    log_p_NB, log_q_NB = both_sides(logits_NV, buckets)
    return (_forward(log_p_NB, log_q_NB) + _reverse(log_p_NB, log_q_NB)) / 2


def paper_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return OmniDraft's own L_DM: reverse KL of p and q, both renormalised on the draft tokens that are target tokens.

    The trace has p of a few of these; all others are the rest bucket, whose P is the trace's tail, an upper bound.

    Args:
        buckets: direct tokens alone, P renormalised over them, and `rest_V` the direct tokens.
    """
    return reverse_kl(logits_NV, buckets)


def jensen_shannon(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return KL(P || M) / 2 + KL(Q || M) / 2 with M = (P + Q) / 2. Range [0, log 2].

    Source: Lin, Divergence measures based on the Shannon entropy, 1991.
    """
    log_p_NB, log_q_NB = both_sides(logits_NV, buckets)
    log_m_NB = torch.logaddexp(log_p_NB, log_q_NB) - math.log(2)
    return (_forward(log_p_NB, log_m_NB) + (log_q_NB.exp() * (log_q_NB - log_m_NB)).sum(dim=-1)) / 2


def total_variation(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return 1 - sum min(P, Q), the probability that a ratio test rejects a draft token. Range [0, 1].

    Source: Leviathan et al., https://arxiv.org/abs/2211.17192, section 3.
    """
    return _variation(*both_sides(logits_NV, buckets))


def lk_hybrid(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return w KL(P || Q) + (1 - w) TV(P, Q) with w = exp(-LK_ETA * acceptance) and acceptance = sum min(P, Q).

    w is a number of each position, and no gradient flows through it. KL where the drafter is far off and the gradient
    of TV vanishes, TV, which is what decoding pays for, where it is close.
    Source: LK losses, https://arxiv.org/abs/2602.23881, the hybrid objective; w per position as in vllm's speculators.
    """
    log_p_NB, log_q_NB = both_sides(logits_NV, buckets)
    variation_N = _variation(log_p_NB, log_q_NB)
    weight_N = torch.exp(-LK_ETA * (1 - variation_N.detach()))
    return weight_N * _forward(log_p_NB, log_q_NB) + (1 - weight_N) * variation_N


def wrong_token_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return forward KL where the drafter's most probable token is not the emitted one, 0 elsewhere.

    Source: online speculative decoding, https://arxiv.org/abs/2310.07177: it learns from the tokens that the
    drafter got wrong. The mean is over all positions, so the loss also falls when more of them are right.
    """
    is_wrong_N = logits_NV.argmax(dim=-1) != buckets.emitted_N
    return forward_kl(logits_NV, buckets) * is_wrong_N


def rejected_kl(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return p log(p / q) + (1 - p) log((1 - p) / (1 - q)), the KL of one draft token, taken or not.

    Args:
        buckets: one each, the first draft token of a target token that was drafted there and rejected.
    """
    return forward_kl(logits_NV, buckets)


def emitted_nll(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return -log q of the draft token that came next. 0 when q is certain of it. Needs no p."""
    logits_N1, others_N = picked_and_rest(logits_NV, buckets.emitted_N[:, None])
    return torch.logaddexp(logits_N1[:, 0], others_N) - logits_N1[:, 0]


def weighted_nll(logits_NV: Tensor, buckets: BucketTargets[Tensor]) -> Tensor:
    """Return -p log q of the draft token that came next, p of the emitted target token that it is a piece of.

    The mean is over pieces, not over their weights: a piece counts at most as much as with a constant weight.
    """
    return buckets.log_p_NS[:, 0].exp() * emitted_nll(logits_NV, buckets)


def sorted_distance(logits_NV: Tensor, ranked: RankedTargets[Tensor]) -> Tensor:
    """Return sum |p_k - q_k| over the likeliest tokens of either side by rank, and their rests. Range [0, 2].

    No token is compared with its like, so no vocabularies have to be.
    Source: universal logit distillation (ULD), https://arxiv.org/abs/2402.12030, section 3.2, over the ranks that a
    trace has.
    """
    logits_NV = logits_NV.float()
    top_NK = logits_NV.topk(min(ranked.p_NK.shape[1], logits_NV.shape[1])).values
    p_NK = ranked.p_NK[:, : top_NK.shape[1]]
    q_NK = (top_NK - logits_NV.logsumexp(dim=-1, keepdim=True)).exp() * (p_NK > 0)
    rest_N = ranked.p_rest_N - (1 - q_NK.sum(dim=-1))
    return (p_NK - q_NK).abs().sum(dim=-1) + rest_N.abs()


def _forward(log_p_NB: Tensor, log_q_NB: Tensor) -> Tensor:
    return (log_p_NB.exp() * (log_p_NB.clamp_min(LOG_P_FLOOR) - log_q_NB)).sum(dim=-1)


def _reverse(log_p_NB: Tensor, log_q_NB: Tensor) -> Tensor:
    return (log_q_NB.exp() * (log_q_NB - log_p_NB.clamp_min(LOG_P_FLOOR))).sum(dim=-1)


def _variation(log_p_NB: Tensor, log_q_NB: Tensor) -> Tensor:
    return (log_q_NB.exp() - log_p_NB.exp()).relu().sum(dim=-1)


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
