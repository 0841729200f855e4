"""Logits of single tokens and the log of two masses of each row: what likelihoods of chunks are made of.

The vocabulary is read twice and one float32 copy of it is kept for the gradient, instead of the six or more that the
same formulas keep in torch's own operations.
Shapes: R rows, V the drafter's vocabulary, M picked (row, id) pairs, in one dimension or several.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST = torch.finfo(torch.float32).tiny
"""The least mass beside the likeliest token's: it keeps a logarithm finite."""


def picked_and_masses(
    logits_RV: Tensor, row_M: Tensor, id_M: Tensor, some_V: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logits of the pairs [M], the logsumexp of all ids [R] and of some ids [R], float32.

    Args:
        some_V: bool, of the ids of the last mass, for as many as it is long; no other id counts. None: no such mass.
    """
    picked_M, all_R, some_R = _PickedAndMasses.apply(logits_RV, row_M, id_M, some_V)  # type: ignore[no-untyped-call]
    return picked_M, all_R, None if some_V is None else some_R


class _PickedAndMasses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, row_M: Tensor, id_M: Tensor, some_V: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mass_RV = logits_RV.to(torch.float32, copy=True)
        picked_M = mass_RV[row_M, id_M]
        largest_R1 = mass_RV.amax(dim=1, keepdim=True)
        mass_RV.sub_(largest_R1).exp_()
        is_some_V = mass_RV.new_zeros(mass_RV.shape[1])
        if some_V is not None:
            is_some_V[: len(some_V)] = some_V.float()
        all_R, some_R = mass_RV.sum(dim=1), (mass_RV @ is_some_V).clamp_min(_LEAST)
        ctx.save_for_backward(mass_RV, all_R, some_R, is_some_V, row_M, id_M)
        ctx.dtype = logits_RV.dtype
        return picked_M, largest_R1[:, 0] + all_R.log(), largest_R1[:, 0] + some_R.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor, grad_all_R: Tensor, grad_some_R: Tensor) -> tuple[Tensor, None, None, None]:
        mass_RV, all_R, some_R, is_some_V, row_M, id_M = ctx.saved_tensors
        grad_RV = torch.outer(grad_some_R / some_R, is_some_V).add_((grad_all_R / all_R)[:, None]).mul_(mass_RV)
        return grad_RV.index_put_((row_M, id_M), grad_M, accumulate=True).to(ctx.dtype), None, None, None
