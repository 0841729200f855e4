"""Gradients of a weighted sum of losses over training examples, with few logits in memory at a time.

The logits of a block of rows are computed, differentiated down to the hidden states and freed; the decoder is
differentiated once per pass. Logits exist at rows with a loss only: with 49,152 tokens they cost as much as 7 layers.
A target belongs to the block that its first row lies in; later rows that it looks at are computed once more there.
Shapes: R rows of a pass, H hidden size, N rows that any loss looks at, V the drafter's vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omnidraft.distill.examples.collate import LOGIT_ROWS, collate, pack
from omnidraft.distill.examples.targets import Kind, LossTargets
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.training.head import HeadTrainer
from omnidraft.distill.training.losses import LOSSES
from omnidraft.ports import TrainableDrafter

Terms = Sequence[tuple[str, float]]
"""(loss, weight) of a sum."""


def num_positions(examples: Sequence[TrainingExample], terms: Terms) -> dict[str, int]:
    """Return the number of positions that each loss has a mean over."""
    return {name: sum(len(each.targets.get(LOSSES[name].positions, ())) for each in examples) for name, _ in terms}


def backward(
    model: TrainableDrafter,
    examples: Sequence[TrainingExample],
    terms: Terms,
    num_by_loss: Mapping[str, int],
    head: HeadTrainer | None = None,
) -> dict[str, float]:
    """Add the gradient of sum(weight * mean loss) to the trained parameters; return each loss summed over positions.

    Args:
        head: one that learns from the same passes, and adds its loss to the sum.
    """
    sums = dict.fromkeys(num_by_loss, 0.0)
    kinds = list(dict.fromkeys(LOSSES[name].positions for name, _ in terms))
    for batch in pack(examples):
        rows_N, targets_of = collate(batch, kinds)
        if not len(rows_N):
            continue
        hidden_NH = model.hidden(batch.texts())[rows_N]
        leaf_NH = hidden_NH.detach().requires_grad_()
        for start in range(0, len(rows_N), LOGIT_ROWS):
            losses = _losses_of_block(model, leaf_NH, start, targets_of, terms)
            total = sum(weight / num_by_loss[name] * losses[name] for name, weight in terms if name in losses)
            if isinstance(total, Tensor):
                total.backward()
            for name, loss in losses.items():
                sums[name] += loss.item()
        if head is not None:
            head.backward(batch, rows_N, leaf_NH)
        hidden_NH.backward(leaf_NH.grad)
    return sums


def _losses_of_block(
    model: TrainableDrafter, leaf_NH: Tensor, start: int, targets_of: Mapping[Kind, LossTargets[Tensor]], terms: Terms
) -> dict[str, Tensor]:
    """Return the sum over the targets of one block of rows, for each loss that has any there."""
    chosen = {kind: _between(targets.row_N, start, start + LOGIT_ROWS) for kind, targets in targets_of.items()}
    chosen = {kind: span for kind, span in chosen.items() if span.start < span.stop}
    if not chosen:
        return {}
    last = max(int(targets_of[kind].last_row_N[span].max()) for kind, span in chosen.items())
    logits_RV = model.logits(leaf_NH[start : last + 1])
    losses = {}
    for name, _ in terms:
        kind = LOSSES[name].positions
        if kind in chosen:
            losses[name] = LOSSES[name].per_position(*targets_of[kind].select(chosen[kind], logits_RV, start)).sum()
    return losses


def _between(row_N: Tensor, start: int, end: int) -> slice:
    low, high = torch.searchsorted(row_N, torch.tensor([start, end])).tolist()
    return slice(low, high)
