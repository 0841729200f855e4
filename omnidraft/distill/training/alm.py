"""Approximate likelihood matching: p and q of the same bytes, whatever tokens they fall into.

Shapes: C chunks, L draft tokens of the longest, R rows of logits, V the drafter's vocabulary.
Letters: p is the target's likelihood of a chunk, q the drafter's, each the product over its own tokens.
Source: Minixhofer et al., https://arxiv.org/abs/2503.20083, section 3. record_chunks.py makes the chunks.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_OUT = -1e30
_CERTAIN = -1e-6  # added to both sides: a likelihood of 1 has a finite divergence and a finite gradient


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of draft tokens, and how likely the target finds their bytes; padded to the longest."""

    first_row_C: Tensor
    """int64; row of the logits that predicts the first token, those of the others follow it."""
    ids_CL: Tensor
    """int64, anything at padding."""
    num_ids_C: Tensor
    """int64, at least 1."""
    log_p_C: Tensor
    """float32; with the boundary after the chunk when `starts_V` is given."""
    tau: float
    """Likelihoods are compared to the power 1 / tau."""
    starts_V: Tensor | None
    """bool; draft tokens that start a word. Given, the row after a chunk says how likely one of them comes next."""

    def __getitem__(self, rows: slice) -> "Chunks":
        return replace(
            self,
            first_row_C=self.first_row_C[rows],
            ids_CL=self.ids_CL[rows],
            num_ids_C=self.num_ids_C[rows],
            log_p_C=self.log_p_C[rows],
        )

    @property
    def last_row_C(self) -> Tensor:
        """The last row that a chunk looks at."""
        return self.first_row_C + self.num_ids_C - (0 if self.starts_V is not None else 1)


def chunk_kl(logits_RV: Tensor, chunks: Chunks) -> Tensor:
    """tau * (p' log(p' / q') + (1 - p') log((1 - p') / (1 - q'))), p' = p^(1 / tau): KL of "these bytes, or others".

    0 when q equals p. For large tau it tends to a log(a / b) - a + b with a = -log p and b = -log q, whatever tau is.
    """
    log_p_C, log_q_C = _tempered(chunks.log_p_C, chunks.tau), _tempered(log_q(logits_RV, chunks), chunks.tau)
    same_C = log_p_C.exp() * (log_p_C - log_q_C)
    other_C = -log_p_C.expm1() * (_log_other(log_p_C) - _log_other(log_q_C))
    return chunks.tau * (same_C + other_C)


def chunk_tv(logits_RV: Tensor, chunks: Chunks) -> Tensor:
    """tau * |p^(1/tau) - q^(1/tau)|, the total variation of the same two. For large tau it tends to |log p - log q|."""
    log_p_C, log_q_C = _tempered(chunks.log_p_C, chunks.tau), _tempered(log_q(logits_RV, chunks), chunks.tau)
    return chunks.tau * (log_p_C.expm1() - log_q_C.expm1()).abs()


def log_q(logits_RV: Tensor, chunks: Chunks) -> Tensor:
    """log of the drafter's likelihood of each chunk, with the boundary after it when that is asked."""
    logits_RV = logits_RV.float()
    all_R = logits_RV.logsumexp(dim=-1)
    place_L = torch.arange(chunks.ids_CL.shape[1])
    real_CL = place_L < chunks.num_ids_C[:, None]
    row_CL = chunks.first_row_C[:, None] + place_L.where(real_CL, 0)
    log_q_C = (logits_RV[row_CL, chunks.ids_CL] - all_R[row_CL]).where(real_CL, 0.0).sum(dim=-1)
    if chunks.starts_V is None:
        return log_q_C
    after_CV = logits_RV[chunks.last_row_C, : len(chunks.starts_V)]
    starting_C = after_CV.masked_fill(~chunks.starts_V, _OUT).logsumexp(dim=-1)
    return log_q_C + starting_C - all_R[chunks.last_row_C]


def _tempered(log_C: Tensor, tau: float) -> Tensor:
    return log_C.clamp_max(0.0) / tau + _CERTAIN


def _log_other(log_C: Tensor) -> Tensor:
    """log(1 - exp(x)), exact for x near 0."""
    return (-log_C.expm1()).log()
