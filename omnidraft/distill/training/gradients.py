"""Gradients of a weighted sum of losses over records, with few logits in memory at a time.

Shapes: R rows of a pass, H hidden size, N rows that any loss looks at, V the drafter's vocabulary.
The logits of a stretch of rows are made, differentiated down to the hidden states and freed; the decoder is
differentiated once per pass. Logits exist at rows with a loss only: with 49,152 tokens they cost as much as 7 layers.
A position belongs to the stretch that its first row lies in; what it looks at beyond is made there once more.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omnidraft.distill.examples.collate import LOGIT_ROWS, LossTargets, collate, hidden_rows, num_targets, pack
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.training.head import HeadTrainer
from omnidraft.distill.training.losses import LOSSES, Kind
from omnidraft.ports import TrainableDrafter

Terms = Sequence[tuple[str, float]]
"""(loss, weight) of a sum."""


def num_positions(records: Sequence[TrainingExample], terms: Terms) -> dict[str, int]:
    """How many positions each loss has: the mean is over these."""
    return {name: sum(num_targets(record, LOSSES[name].positions) for record in records) for name, _ in terms}


def backward(
    model: TrainableDrafter,
    records: Sequence[TrainingExample],
    terms: Terms,
    num_by_loss: Mapping[str, int],
    head: HeadTrainer | None = None,
) -> dict[str, float]:
    """Add the gradient of sum(weight * mean loss) to the trained parameters; the sum over positions of each loss.

    Args:
        head: one that learns from the same passes, and adds its loss to the sum.
    """
    sums = dict.fromkeys(num_by_loss, 0.0)
    kinds = list(dict.fromkeys(LOSSES[name].positions for name, _ in terms))
    for group in pack(records):
        rows_N, wanted = collate(group, kinds)
        if not len(rows_N):
            continue
        hidden_NH = hidden_rows(model, group)[rows_N]
        leaf_NH = hidden_NH.detach().requires_grad_()
        for start in range(0, len(rows_N), LOGIT_ROWS):
            losses = _losses_from(model, leaf_NH, start, wanted, terms)
            total = sum(weight / num_by_loss[name] * losses[name] for name, weight in terms if name in losses)
            if isinstance(total, Tensor):
                total.backward()
            for name, loss in losses.items():
                sums[name] += loss.item()
        if head is not None:
            head.backward(group, rows_N, leaf_NH)
        hidden_NH.backward(leaf_NH.grad)
    return sums


def _losses_from(
    model: TrainableDrafter, leaf_NH: Tensor, start: int, wanted: Mapping[Kind, LossTargets], terms: Terms
) -> dict[str, Tensor]:
    """Sum over the positions of one stretch of rows, for each loss that has any there."""
    here = {kind: _between(what.first_row_N, start, start + LOGIT_ROWS) for kind, what in wanted.items()}
    here = {kind: found for kind, found in here.items() if found.start < found.stop}
    if not here:
        return {}
    last = max(int(wanted[kind].last_row_N[found].max()) for kind, found in here.items())
    logits_RV = model.logits(leaf_NH[start : last + 1])
    losses = {}
    for name, _ in terms:
        loss = LOSSES[name]
        if loss.positions in here:
            what = wanted[loss.positions].at(here[loss.positions], logits_RV, start)
            losses[name] = loss.per_position(*what).sum()
    return losses


def _between(row_N: Tensor, start: int, end: int) -> slice:
    low, high = torch.searchsorted(row_N, torch.tensor([start, end])).tolist()
    return slice(low, high)
