"""How often the drafter's first candidate is the token the target emitted, on records it does not learn from.

Shapes: N rows of logits, V the drafter's vocabulary, T the target's. Letters: q is the drafter's distribution.
A position agrees when the target token with the largest q, summed over all draft tokens that begin with it, is the
emitted one. A token that was emitted as a merge also agrees when the most probable draft token is the right piece at
each of its pieces, since then greedy drafting spells it; whether an n-gram cache knows it is not asked.
Every position of the record counts, the undraftable ones too; only those skipped by batch.py do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnidraft.distill.batch import Positions
from omnidraft.distill.passes import LOGIT_ROWS, Group, grouped, hidden_rows
from omnidraft.ports import TrainableDrafter
from omnidraft.vocab.alignment import Alignment


@dataclass(frozen=True, slots=True)
class Agreed:
    """Positions of one record; counts add up over records."""

    num_agreed: int
    num_scored: int


def share(counts: Sequence[Agreed]) -> float | None:
    """Agreement over these records; None when they have no position."""
    num_scored = sum(count.num_scored for count in counts)
    return sum(count.num_agreed for count in counts) / num_scored if num_scored else None


@torch.no_grad()
def agreed(model: TrainableDrafter, records: Sequence[Positions], alignment: Alignment) -> list[Agreed]:
    """Counts of each record, in their order."""
    first_D = torch.from_numpy(alignment.first_D)
    counts: dict[int, Agreed] = {}
    for group in grouped(records):
        hidden_RH = hidden_rows(model, group)
        for place, (index, record) in enumerate(zip(group.indices, group.records, strict=True)):
            counts[index] = _count(model, hidden_RH, group, place, record, first_D, alignment.num_target)
    return [counts[index] for index in range(len(records))]


def _count(
    model: TrainableDrafter,
    hidden_RH: Tensor,
    group: Group,
    place: int,
    record: Positions,
    first_D: Tensor,
    num_target: int,
) -> Agreed:
    first_N = _first_candidates(model, hidden_RH[group.rows(place, record.at_P)], first_D, num_target)
    agrees_P = first_N == torch.from_numpy(record.emitted_P)
    greedy_M = _greedy(model, hidden_RH[group.rows(place, record.piece_at_M)])
    is_right_M = greedy_M == torch.from_numpy(record.piece_ids_M)
    row_M = torch.from_numpy(record.piece_row_M)
    num_wrong_P = torch.zeros(len(agrees_P), dtype=torch.int64).index_add_(0, row_M, (~is_right_M).long())
    is_merge_P = torch.zeros(len(agrees_P), dtype=torch.bool).index_fill_(0, row_M, True)
    agrees_P |= is_merge_P & (num_wrong_P == 0)
    return Agreed(int(agrees_P.sum()), len(agrees_P))


def _first_candidates(model: TrainableDrafter, hidden_NH: Tensor, first_D: Tensor, num_target: int) -> Tensor:
    """The target id with the largest sum of q at each row."""
    found = []
    for start in range(0, len(hidden_NH), LOGIT_ROWS):
        q_NV = model.logits(hidden_NH[start : start + LOGIT_ROWS])[:, : len(first_D)].softmax(dim=-1)
        q_NT = torch.zeros(len(q_NV), num_target + 1).index_add_(1, first_D[: q_NV.shape[1]], q_NV)
        found.append(q_NT[:, :num_target].argmax(dim=-1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _greedy(model: TrainableDrafter, hidden_NH: Tensor) -> Tensor:
    """The most probable draft token at each row."""
    parts = [model.logits(part).argmax(dim=-1) for part in hidden_NH.split(LOGIT_ROWS) if len(part)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
