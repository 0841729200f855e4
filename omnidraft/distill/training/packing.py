"""Passes of the drafter over records: short records share one, without padding; memory is bounded.

What stands before the first place that is asked about (the prompt, and the answer of earlier segments) is context: it
is computed without gradients, a third of the work. Its keys and values count as constants.
Shapes: R rows of a pass, of which the context comes first; H hidden size, N chosen rows behind the context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.errors import ContractError
from omnidraft.ports import PackedTexts, TrainableDrafter

PASS_ROWS = 256
"""Rows with gradients in a pass, unless one record alone has more. They cost 1.7 MB each in SmolLM2-135M."""
LOGIT_ROWS = 256
"""Rows of logits that exist at a time: 50 MB for 49,152 tokens, and a few copies."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Records of one pass."""

    indices: tuple[int, ...]
    """Which of the records, for results in their order."""
    records: tuple[TrainingExample, ...]

    def rows(self, place: int, at: np.ndarray) -> Tensor:
        """Rows behind the context in which these ids of one record stand."""
        starts = [_num_context(record) for record in self.records]
        if len(at) and at.min() < starts[place]:
            raise ContractError(f"id {at.min()} of a record is asked about, its first {starts[place]} are context")
        before = sum(len(record.ids_T) - start for record, start in zip(self.records[:place], starts, strict=False))
        return torch.from_numpy(at - starts[place] + before)


def pack(records: Sequence[TrainingExample]) -> Iterator[PackedBatch]:
    """All records that are asked about anything, in order, as many to a group as PASS_ROWS holds."""
    taken: list[int] = []
    num_rows = 0
    for index, record in enumerate(records):
        rows = len(record.ids_T) - _num_context(record)
        if taken and num_rows + rows > PASS_ROWS:
            yield PackedBatch(tuple(taken), tuple(records[one] for one in taken))
            taken, num_rows = [], 0
        taken.append(index)
        num_rows += rows
    if taken:
        yield PackedBatch(tuple(taken), tuple(records[one] for one in taken))


def hidden_rows(model: TrainableDrafter, group: PackedBatch) -> Tensor:
    """Hidden states [N, H] of all rows behind the context."""
    starts = [_num_context(record) for record in group.records]
    places = [
        (number, slice(*ends))
        for ends_of in ([(0, start) for start in starts], [(start, None) for start in starts])
        for number, ends in enumerate(ends_of)
    ]
    positions = [np.arange(len(record.ids_T)) for record in group.records]
    return model.hidden(
        PackedTexts(
            ids_R=_joined([group.records[number].ids_T[part] for number, part in places]),
            text_R=_joined([np.full_like(positions[number][part], number) for number, part in places]),
            position_R=_joined([positions[number][part] for number, part in places]),
            num_context=sum(starts),
        )
    )


def _num_context(record: TrainingExample) -> int:
    """Ids before the first that is asked about; one less than all when nothing is."""
    asked = [int(at.min()) for at in (record.at_P, record.piece_at_M) if len(at)]
    return min(asked, default=max(len(record.ids_T) - 1, 0))


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
