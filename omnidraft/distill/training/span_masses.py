"""Masses of spans of the vocabulary in an order of its own: any sum over tokens that stand together costs the same.

Shapes: R rows, V the vocabulary, M pairs of a row and a span.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def span_masses(logits_RV: Tensor, row_M: Tensor, low_M: Tensor, high_M: Tensor, order_V: Tensor) -> Tensor:
    """Return exp(logits) summed over order_V[low:high] of each row, over the largest of the row; float64 [M].

    Args:
        order_V: each id once.
    """
    return _SpanMasses.apply(logits_RV, row_M, low_M, high_M, order_V)  # type: ignore[no-any-return,no-untyped-call]


class _SpanMasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, row_M: Tensor, low_M: Tensor, high_M: Tensor, order_V: Tensor) -> Tensor:
        mass_RV = logits_RV.index_select(1, order_V).float()
        mass_RV.sub_(mass_RV.amax(dim=1, keepdim=True)).exp_()
        ctx.save_for_backward(mass_RV, row_M, low_M, high_M, order_V)
        ctx.dtype, ctx.size = logits_RV.dtype, logits_RV.shape[1]
        before_RV = torch.zeros(
            len(mass_RV), mass_RV.shape[1] + 1, dtype=torch.float64
        )  # float32 would lose small masses
        torch.cumsum(mass_RV, dim=1, dtype=torch.float64, out=before_RV[:, 1:])
        return before_RV[row_M, high_M] - before_RV[row_M, low_M]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None, None, None, None]:
        mass_RV, row_M, low_M, high_M, order_V = ctx.saved_tensors
        steps_RV = torch.zeros(len(mass_RV), mass_RV.shape[1] + 1, dtype=torch.float64)
        steps_RV.index_put_((row_M, low_M), grad_M, accumulate=True)
        steps_RV.index_put_((row_M, high_M), -grad_M, accumulate=True)
        by_order_RV = steps_RV.cumsum_(dim=1)[:, :-1].to(torch.float32).mul_(mass_RV)
        grad_RV = mass_RV.new_zeros((len(mass_RV), ctx.size))
        return grad_RV.index_copy_(1, order_V, by_order_RV).to(ctx.dtype), None, None, None, None
