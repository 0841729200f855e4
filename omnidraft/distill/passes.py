"""Passes of the drafter over records: padded on the right, records of like length together, memory bounded.

Shapes: B texts, T draft tokens, R = B * T rows of a pass, H hidden size, N chosen rows, V the drafter's vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.batch import Positions
from omnidraft.ports import TrainableDrafter

PASS_TOKENS = 256
"""Padded tokens of one pass, unless one record alone has more: short records share a pass, others have their own.
SmolLM2-135M on one core, 4 records of 239 to 276 ids: 13.4 s a step, against 14.9 s in one padded pass."""
LOGIT_ROWS = 256
"""Rows of logits that exist at a time: 50 MB for 49,152 tokens, and a few copies."""


@dataclass(frozen=True, slots=True)
class Group:
    """Records of one pass."""

    indices: tuple[int, ...]
    """Which of the records, for results in their order."""
    records: tuple[Positions, ...]
    width: int
    """T: the longest record's."""

    def rows(self, place: int, at: np.ndarray) -> Tensor:
        """Rows of the pass in which these ids of one record stand."""
        return torch.from_numpy(at + place * self.width)


def grouped(records: Sequence[Positions]) -> Iterator[Group]:
    """All records, longest first, each group at most PASS_TOKENS wide in all."""
    order = sorted(range(len(records)), key=lambda index: (-len(records[index].ids_T), index))
    while order:
        width = len(records[order[0]].ids_T)
        taken, order = order[: max(1, PASS_TOKENS // width)], order[max(1, PASS_TOKENS // width) :]
        yield Group(tuple(taken), tuple(records[index] for index in taken), width)


def hidden_rows(model: TrainableDrafter, group: Group) -> Tensor:
    """Hidden states [R, H] of a group."""
    ids_BT = torch.zeros(len(group.records), group.width, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for place, record in enumerate(group.records):
        ids_BT[place, : len(record.ids_T)] = torch.from_numpy(record.ids_T)
        mask_BT[place, : len(record.ids_T)] = 1
    return model.hidden(ids_BT, mask_BT).flatten(0, 1)
