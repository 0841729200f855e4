"""A few logits of each row, and the logsumexp of all others: what every loss over buckets is made of.

The vocabulary is read three times and one float32 copy of it is kept for the gradient, instead of the four or more
that the same formula keeps in torch's own operations.
Shapes: N rows, V the drafter's vocabulary, S picked ids.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
