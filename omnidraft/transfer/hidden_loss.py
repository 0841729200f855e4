"""Hidden states as a loss beside likelihoods, weighed so that both pull with the same force.

At a point where both tokenisations end, the model before and the model after have read the same bytes, so their last
hidden states should be the same: the loss is their squared distance over the squared length of the former.
GradMag divides each loss by the norm of its gradient at the last layer. Here the norm is that at the output of the last
layer, the loss of the likelihoods keeps its size, and the other gets the quotient of both norms in each pass: the ratio
is the same, and nothing has to be differentiated twice.
Shapes: R rows of a pass, N points, H hidden size.
Source: docs/algorithms.md, section 14; ALM, https://arxiv.org/abs/2503.20083, sections 3 and 4.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from omnidraft.distill.examples.collate import PackedBatch, join
from omnidraft.distill.examples.targets import HiddenTargets
from omnidraft.distill.examples.training_example import TrainingExample

LOSS: Final = "hidden"
"""The name of this loss in reports."""


class HiddenLoss:
    """Implements distill.training.gradients.HiddenStateLoss. In a step: `begin`, `backward` for each pass, `mean`."""

    def __init__(self, weight: float) -> None:
        """
        Args:
            weight: in norms of the other losses' gradient.
        """
        self._weight = weight
        self._num, self._num_seen, self._sum = 0, 0, 0.0

    def begin(self, examples: Sequence[TrainingExample]) -> None:
        """Start a step over these examples."""
        self._num, self._num_seen, self._sum = sum(len(each.targets[LOSS]) for each in examples), 0, 0.0

    @property
    def mean(self) -> float:
        """The loss of the step so far, over the points of its passes: those behind a text's last chunk are in none."""
        return self._sum / max(self._num_seen, 1)

    def backward(self, batch: PackedBatch, row_N: Tensor, hidden_NH: Tensor) -> None:
        known: HiddenTargets[Tensor] = join(batch, [each.targets[LOSS] for each in batch.examples])
        is_here_N = torch.isin(known.row_N, row_N)
        at_N = torch.searchsorted(row_N, known.row_N[is_here_N])
        q_NH = hidden_NH.detach()[at_N].float().requires_grad_()
        loss = relative_distances(known.hidden_NH[is_here_N], q_NH).sum()
        (grad_NH,) = torch.autograd.grad(loss / self._num, q_NH)
        self._num_seen += len(at_N)
        self._sum += loss.item()
        assert hidden_NH.grad is not None
        weight = self._weight * _ratio(hidden_NH.grad, grad_NH)
        hidden_NH.grad.index_add_(0, at_N, (weight * grad_NH).to(hidden_NH.dtype))


def relative_distances(p_NH: Tensor, q_NH: Tensor) -> Tensor:
    """Return |q - p|^2 / |p|^2 of each point. 0 when q equals p."""
    return (q_NH - p_NH).square().sum(dim=-1) / p_NH.square().sum(dim=-1).clamp_min(torch.finfo(p_NH.dtype).tiny)


def _ratio(others_RH: Tensor, own_NH: Tensor) -> float:
    """Return the norm of the other losses' gradient over that of this one; 0 where this one has none."""
    own = own_NH.norm().item()
    return others_RH.float().norm().item() / own if own else 0.0
