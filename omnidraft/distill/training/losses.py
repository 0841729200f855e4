"""The losses by name, with the positions that each is evaluated at, and weighted sums of them as settings spell them.

docs/algorithms.md, sections 6 (losses at positions) and 7 (approximate likelihood matching).

Losses at single positions are pure functions, logits in, one number per position out; the learner decides which
positions count, and takes their mean. The vocabulary is read three times and one float32 copy of it is kept for the
gradient, instead of the four or more that the same formula keeps in torch's own operations.
Shapes: N positions, V the drafter's vocabulary, S picked ids or buckets, B = S + 1 with the rest bucket last. Letters:
p is the target's distribution and P its mass per bucket, q and Q the drafter's. No gradient flows through P.
Source: where no other is named, OmniDraft, https://arxiv.org/abs/2507.02659, section 4.2, over the buckets of
buckets.py instead of its renormalised intersection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omnidraft.distill.examples.targets import LOG_P_FLOOR, BucketTargets, Kind
from omnidraft.distill.training import alm
from omnidraft.errors import ConfigError

OUT = -1e30
"""A logit that counts for nothing; finite, so that a row without others has no NaN in its gradient."""


def picked_and_rest(logits_NV: Tensor, ids_NS: Tensor, rest_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the logits at the picked ids [N, S], and the logsumexp of the others [N], float32.

    Args:
        ids_NS: an id may stand several times in a row.
        rest_V: bool; the only ids that belong to the others, for as many as it is long; None: all.
    """
    return _PickedAndRest.apply(logits_NV, ids_NS, rest_V)  # type: ignore[no-any-return,no-untyped-call]


class _PickedAndRest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NS: Tensor, rest_V: Tensor | None) -> tuple[Tensor, Tensor]:
        others_NV = logits_NV.to(torch.float32, copy=True)
        logits_NS = others_NV.gather(1, ids_NS)
        others_NV.scatter_(1, ids_NS, OUT)
        if rest_V is not None:
            others_NV[:, : len(rest_V)].masked_fill_(~rest_V, OUT)
            others_NV[:, len(rest_V) :] = OUT
        largest_N1 = others_NV.amax(dim=1, keepdim=True)
        others_NV.sub_(largest_N1).exp_()
        sum_N1 = others_NV.sum(dim=1, keepdim=True)
        ctx.save_for_backward(others_NV, sum_N1, ids_NS)
        ctx.dtype = logits_NV.dtype
        return logits_NS, (largest_N1 + sum_N1.log())[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NS: Tensor, grad_N: Tensor) -> tuple[Tensor, None, None]:
        others_NV, sum_N1, ids_NS = ctx.saved_tensors
        grad_NV = others_NV * (grad_N[:, None] / sum_N1)
        return grad_NV.scatter_add_(1, ids_NS, grad_NS).to(ctx.dtype), None, None


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


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the positions it is meant for."""

    per_position: Callable[[Tensor, Any], Tensor]
    """(logits, targets) -> one number per target; ChunkTargets for chunks, else BucketTargets."""
    positions: Kind


LOSSES: dict[str, Loss] = {
    "dm": Loss(forward_kl, "boundary"),
    "dm_reverse": Loss(reverse_kl, "boundary"),
    "dm_paper": Loss(paper_kl, "direct"),
    "tv": Loss(total_variation, "boundary"),
    "nll": Loss(emitted_nll, "emitted"),
    "ngram": Loss(emitted_nll, "piece"),
    "alm": Loss(alm.chunk_kl, "chunk"),
}


def parse(text: str) -> tuple[tuple[str, float], ...]:
    """Return (name, weight) of each term of a sum such as "dm + 0.2 ngram".

    Raises:
        ConfigError: an unknown name, a weight that is no positive number, or the same name twice.
    """
    terms = tuple(_parse_term(term) for term in text.split("+"))
    if len({name for name, _ in terms}) < len(terms):
        raise ConfigError(f"loss {text!r} names a loss twice")
    return terms


def _parse_term(term: str) -> tuple[str, float]:
    parts = term.replace("*", " ").split()
    name = parts[-1] if parts else ""
    if name not in LOSSES or len(parts) > 2:
        raise ConfigError(f"no loss {term.strip()!r}; write a sum of [weight] name, names: {', '.join(LOSSES)}")
    weight = _number(parts[0]) if len(parts) == 2 else 1.0
    if not 0 < weight < float("inf"):
        raise ConfigError(f"the weight of loss {name!r} must be a positive number, got {parts[0]!r}")
    return name, weight


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as exc:
        raise ConfigError(f"the weight of a loss must be a positive number, got {text!r}") from exc
