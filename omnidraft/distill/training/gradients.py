"""Gradients of a weighted sum of losses over training examples, with few logits in memory at a time.

The logits of a block of rows are computed, differentiated down to the hidden states and freed; the decoder is
differentiated once per pass. The losses of a block are computed for a few of its rows at a time, whose float32 copies
stay in the processor's caches. Logits exist at rows with a loss only: with 49,152 tokens they cost as much as 7 layers.
A target belongs to the block that its first row lies in; later rows that it looks at are computed once more there.
Shapes: R rows of a pass, H hidden size, N rows that any loss looks at, V the drafter's vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from omnidraft import throttle
from omnidraft.distill.examples.collate import LOGIT_ROWS, LOSS_ROWS, PackedBatch, collate, pack
from omnidraft.distill.examples.targets import Kind, LossTargets
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.training.losses import LOSSES
from omnidraft.ports import TrainableDrafter

Terms = Sequence[tuple[str, float]]
"""(loss, weight) of a sum."""
GRAD_CLIP = 1.0
"""The largest norm of a step's gradients: one odd batch moves the weights no further than a usual one."""


class HiddenStateLoss(Protocol):
    """A loss on the last hidden states, beside those on the logits."""

    def backward(self, batch: PackedBatch, row_N: Tensor, hidden_NH: Tensor) -> None:
        """Add its gradient to that of the hidden states, which have the gradients of all losses on logits already.

        Args:
            row_N: the rows of the pass that the hidden states belong to, rising.
        """


def num_positions(examples: Sequence[TrainingExample], terms: Terms) -> dict[str, int]:
    """Return the number of positions of each loss."""
    return {name: sum(len(each.targets.get(LOSSES[name].positions, ())) for each in examples) for name, _ in terms}


def backward(
    model: TrainableDrafter,
    examples: Sequence[TrainingExample],
    terms: Terms,
    num_by_loss: Mapping[str, int],
    on_hidden: HiddenStateLoss | None = None,
) -> dict[str, float]:
    """Add a gradient to the trained parameters; return each loss summed over positions.

    It is that of the mean over positions of the weighted sum, where a loss is zero at positions that it does not have,
    as n-grams begin at few: OmniDraft's Eq. (4). The positions are those of the loss with most.

    Args:
        on_hidden: one more loss of the same passes, which is added to the sum.
    """
    sums = dict.fromkeys(num_by_loss, 0.0)
    weight_of = {name: weight / max(num_by_loss.values()) for name, weight in terms if num_by_loss[name]}
    kinds = list(dict.fromkeys(LOSSES[name].positions for name, _ in terms))
    for batch in pack(examples, model.precision):
        rows_N, targets_of = collate(batch, kinds)
        if not len(rows_N):
            continue
        hidden_NH = model.hidden(batch.texts()).index_select(0, rows_N)
        leaf_NH = hidden_NH.detach().requires_grad_()
        for start in range(0, len(rows_N), LOGIT_ROWS):
            losses = _backward_of_block(model, leaf_NH, start, targets_of, weight_of)
            for name, loss in losses.items():
                sums[name] += loss
        if on_hidden is not None:
            on_hidden.backward(batch, rows_N, leaf_NH)
        hidden_NH.backward(leaf_NH.grad)
    return sums


def _backward_of_block(
    model: TrainableDrafter,
    leaf_NH: Tensor,
    start: int,
    targets_of: Mapping[Kind, LossTargets[Tensor]],
    weight_of: Mapping[str, float],
) -> dict[str, float]:
    """Differentiate the losses whose targets begin in one block of rows; return their sums."""
    spans = _spans(targets_of, start, start + LOGIT_ROWS)
    if not spans:
        return {}
    logits_RV = model.logits(leaf_NH[start : _end(targets_of, spans)])
    grad_RV = torch.zeros_like(logits_RV)
    sums = dict.fromkeys(weight_of, 0.0)
    for first in range(start, start + LOGIT_ROWS, LOSS_ROWS):
        spans = _spans(targets_of, first, min(first + LOSS_ROWS, start + LOGIT_ROWS))
        if not spans:
            continue
        throttle.rest()
        rows = slice(first - start, _end(targets_of, spans) - start)
        part_RV = logits_RV.detach()[rows].requires_grad_()
        total = torch.zeros((), dtype=torch.float32)
        for name, weight in weight_of.items():
            kind = LOSSES[name].positions
            if kind in spans:
                loss = LOSSES[name].per_position(*targets_of[kind].select(spans[kind], part_RV, first)).sum()
                total = total + weight * loss
                sums[name] += loss.item()
        total.backward()
        assert part_RV.grad is not None
        grad_RV[rows] += part_RV.grad
    logits_RV.backward(grad_RV)
    return sums


def _spans(targets_of: Mapping[Kind, LossTargets[Tensor]], start: int, end: int) -> dict[Kind, slice]:
    """Return the targets of each kind whose first row lies in a block of rows, without kinds that have none there."""
    spans = {kind: _between(targets.row_N, start, end) for kind, targets in targets_of.items()}
    return {kind: span for kind, span in spans.items() if span.start < span.stop}


def _end(targets_of: Mapping[Kind, LossTargets[Tensor]], spans: Mapping[Kind, slice]) -> int:
    """Return the row after the last one that these targets look at."""
    return 1 + max(int(targets_of[kind].last_row_N[span].max()) for kind, span in spans.items())


def _between(row_N: Tensor, start: int, end: int) -> slice:
    low, high = torch.searchsorted(row_N, torch.tensor([start, end])).tolist()
    return slice(low, high)
