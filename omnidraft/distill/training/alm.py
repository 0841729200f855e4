"""Approximate likelihood matching: p and q of the same bytes, whatever tokens they fall into.

Shapes: N chunks, L draft tokens of the longest, R rows of logits, V the drafter's vocabulary.
Letters: p is the target's likelihood of a chunk, q the drafter's, each the product over its own tokens.
Source: docs/algorithms.md, section 7; Minixhofer et al., https://arxiv.org/abs/2503.20083, section 3.
"""

import torch
from torch import Tensor

from omnidraft.distill.examples.targets import ChunkTargets
from omnidraft.distill.training.log_masses import picked_and_masses

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
