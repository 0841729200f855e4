"""Gradients of a weighted sum of losses over records, with few logits in memory at a time.

Shapes: R rows of a pass, H hidden size, N positions, S buckets, V the drafter's vocabulary.
The logits of a chunk of rows are made, differentiated down to the hidden states and freed; the decoder is
differentiated once per pass. Logits exist at rows with a loss only: with 49,152 tokens they cost as much as 7 layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.batch import Positions
from omnidraft.distill.losses import LOSSES, Buckets
from omnidraft.distill.passes import LOGIT_ROWS, Group, grouped, hidden_rows
from omnidraft.ports import TrainableDrafter

Terms = Sequence[tuple[str, float]]
"""(loss, weight) of a sum."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one kind of loss asks for in a pass; rows rise."""

    row_N: Tensor
    buckets: Buckets

    def between(self, start: int, end: int) -> slice:
        low, high = torch.searchsorted(self.row_N, torch.tensor([start, end])).tolist()
        return slice(low, high)


def num_positions(records: Sequence[Positions], terms: Terms) -> dict[str, int]:
    """How many positions each loss has: the mean is over these."""
    of_kind = {
        "boundary": sum(len(record.at_P) for record in records if record.buckets is not None),
        "piece": sum(len(record.piece_at_M) for record in records),
    }
    return {name: of_kind[LOSSES[name].positions] for name, _ in terms}


def backward(
    model: TrainableDrafter, records: Sequence[Positions], terms: Terms, num_by_loss: Mapping[str, int]
) -> dict[str, float]:
    """Add the gradient of sum(weight * mean loss) to the trained parameters; the sum over positions of each loss."""
    sums = dict.fromkeys(num_by_loss, 0.0)
    for group in grouped(records):
        rows_N, asked = _asked(group)
        if not len(rows_N):
            continue
        hidden_NH = hidden_rows(model, group)[rows_N]
        leaf_NH = hidden_NH.detach().requires_grad_()
        for start in range(0, len(rows_N), LOGIT_ROWS):
            chunk = _chunk_losses(model, leaf_NH, start, asked, terms)
            total = sum(weight / num_by_loss[name] * chunk[name] for name, weight in terms if name in chunk)
            if isinstance(total, Tensor):
                total.backward()
            for name, loss in chunk.items():
                sums[name] += loss.item()
        hidden_NH.backward(leaf_NH.grad)
    return sums


def _chunk_losses(
    model: TrainableDrafter, leaf_NH: Tensor, start: int, asked: Mapping[str, _Asked], terms: Terms
) -> dict[str, Tensor]:
    """Sum over the positions of one chunk of rows, for each loss that has any there."""
    logits_NV = model.logits(leaf_NH[start : start + LOGIT_ROWS])
    losses = {}
    for name, _ in terms:
        loss = LOSSES[name]
        wanted = asked[loss.positions]
        here = wanted.between(start, start + LOGIT_ROWS)
        if here.start < here.stop:
            losses[name] = loss.per_position(logits_NV[wanted.row_N[here] - start], wanted.buckets[here]).sum()
    return losses


def _asked(group: Group) -> tuple[Tensor, dict[str, _Asked]]:
    """The rows of a pass that any loss looks at, rising, and what is asked there in terms of these."""
    boundary = [place for place, record in enumerate(group.records) if record.buckets is not None]
    at_boundary = _joined([group.rows(place, group.records[place].at_P) for place in boundary])
    at_piece = _joined([group.rows(place, record.piece_at_M) for place, record in enumerate(group.records)])
    rows_N = torch.unique(torch.cat([at_boundary, at_piece]))  # sorted
    asked = {
        "boundary": _Asked(torch.searchsorted(rows_N, at_boundary), _joined_buckets(group)),
        "piece": _Asked(torch.searchsorted(rows_N, at_piece), _piece_buckets(group)),
    }
    return rows_N, asked


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.int64)


def _joined_buckets(group: Group) -> Buckets:
    """Of all records of the pass; narrower ones padded with copies of their first column."""
    found = [record.buckets for record in group.records if record.buckets is not None]
    width = max((buckets.ids_PS.shape[1] for buckets in found), default=1)
    return Buckets(
        ids_NS=_stacked([np.pad(b.ids_PS, _to(width, b.ids_PS), mode="edge") for b in found], width, torch.int64),
        log_p_NS=_stacked([np.pad(b.log_p_PS, _to(width, b.ids_PS)) for b in found], width, torch.float32),
        real_NS=_stacked([np.pad(b.real_PS, _to(width, b.ids_PS)) for b in found], width, torch.bool),
        log_p_rest_N=_joined([torch.from_numpy(b.log_p_rest_P) for b in found]),
    )


def _to(width: int, columns: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]]:
    return (0, 0), (0, width - columns.shape[1])


def _stacked(parts: Sequence[np.ndarray], width: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, width, dtype=dtype)


def _piece_buckets(group: Group) -> Buckets:
    """One bucket each, certain."""
    ids_M = _joined([torch.from_numpy(record.piece_ids_M) for record in group.records])
    certain_M1 = torch.zeros(len(ids_M), 1)
    nothing_M = torch.full((len(ids_M),), -torch.inf)
    return Buckets(ids_M[:, None], certain_M1, torch.ones(len(ids_M), 1, dtype=torch.bool), nothing_M)
