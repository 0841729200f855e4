"""Approximate likelihood matching: p and q of the same bytes, whatever tokens they fall into.

Shapes: N chunks, L draft tokens of the longest, R rows of logits, V the drafter's vocabulary.
Letters: p is the target's likelihood of a chunk, q the drafter's, each the product over its own tokens.
Source: docs/algorithms.md, section 7; Minixhofer et al., https://arxiv.org/abs/2503.20083, section 3.

Likelihoods are made of logits of single tokens and the log of two masses of each row. The vocabulary is read twice and
one float32 copy of it is kept for the gradient, instead of the six or more that torch's own operations keep; M picked
(row, id) pairs may have one dimension or several.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omnidraft.distill.examples.targets import ChunkTargets

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


_CERTAIN = -1e-6  # added to both sides: a likelihood of 1 has a finite divergence and a finite gradient


def chunk_kl(logits_RV: Tensor, chunks: ChunkTargets[Tensor]) -> Tensor:
    """Return tau * (p' log(p' / q') + (1 - p') log((1 - p') / (1 - q'))), p' = p^(1 / tau).

    It is the KL of "these bytes, or others", and 0 when q equals p. For large tau it tends to a log(a / b) - a + b with
    a = -log p and b = -log q, whatever tau is.
    """
    log_p_N, log_q_N = _tempered(chunks.log_p_N, chunks.tau), _tempered(log_q(logits_RV, chunks), chunks.tau)
    same_N = log_p_N.exp() * (log_p_N - log_q_N)
    other_N = -log_p_N.expm1() * (_log_other(log_p_N) - _log_other(log_q_N))
    return chunks.tau * (same_N + other_N)


def log_q(logits_RV: Tensor, chunks: ChunkTargets[Tensor]) -> Tensor:
    """Return the log of the drafter's likelihood of each chunk, with the boundary after it when `starts_V` is given."""
    offset_L = torch.arange(chunks.ids_NL.shape[1])
    real_NL = offset_L < chunks.num_ids_N[:, None]
    row_NL = chunks.row_N[:, None] + offset_L.where(real_NL, 0)
    picked_NL, all_R, starting_R = picked_and_masses(logits_RV, row_NL, chunks.ids_NL, chunks.starts_V)
    log_q_N = (picked_NL - all_R[row_NL]).where(real_NL, 0.0).sum(dim=-1)
    return log_q_N if starting_R is None else log_q_N + (starting_R - all_R)[chunks.last_row_N]


def _tempered(log_N: Tensor, tau: float) -> Tensor:
    return log_N.clamp_max(0.0) / tau + _CERTAIN


def _log_other(log_N: Tensor) -> Tensor:
    """Return log(1 - exp(x)), exact for x near 0."""
    return (-log_N.expm1()).log()
