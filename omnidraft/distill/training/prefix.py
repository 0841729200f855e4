"""The divergence from a teacher's next token, whatever longer tokens the student has for it.

Shapes: N targets, S buckets, B = S + 1, M = N x B, R rows of logits, V the student's vocabulary. Letters: P is the
teacher's mass of a bucket, Q the student's among the ids that the target is about.
Source: docs/algorithms.md, section 14.
"""

import torch
from torch import Tensor

from omnidraft.distill.examples.targets import PrefixTargets
from omnidraft.distill.training.span_masses import span_masses

_LEAST = 1e-12
"""The least mass: it keeps a logarithm and its gradient finite."""


def prefix_kl(logits_RV: Tensor, targets: PrefixTargets[Tensor]) -> Tensor:
    """Return sum P log(P / Q) over buckets and rest, [N]. 0 when Q equals P."""
    shape, row_NB = targets.low_NB.shape, targets.row_N[:, None].expand_as(targets.low_NB)
    row_M, low_M, high_M = (each.reshape(-1) for each in (row_NB, targets.low_NB, targets.high_NB))
    mass_NB = span_masses(logits_RV, row_M, low_M, high_M, targets.order_V).reshape(shape)
    within_N, mass_NS = mass_NB[:, 0], mass_NB[:, 1:]
    rest_N = within_N - mass_NS.sum(dim=1)
    q_NB = (torch.cat([mass_NS, rest_N[:, None]], dim=1) / within_N.clamp_min(_LEAST)[:, None]).clamp_min(_LEAST)
    p_NB = torch.cat([targets.p_NS, targets.p_rest_N[:, None]], dim=1).double()
    return (torch.xlogy(p_NB, p_NB) - p_NB * q_NB.log()).sum(dim=1).float()
