"""Training examples of one pass of the drafter, packed without padding, and their targets joined into tensors.

Everything before the first row that a loss looks at (the prompt, and the answer of earlier segments) is context: it is
computed without gradients, a third of the work. Its keys and values count as constants.
Shapes: R rows of a pass, the context first; N rows that the losses look at, or targets.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.examples.targets import Kind, LossTargets, Targets
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.errors import ContractError
from omnidraft.ports import PackedTexts, Precision

PASS_ROWS = 256
"""Rows with gradients in a pass, unless one record alone has more. They cost 1.7 MB each in SmolLM2-135M."""
PASS_ROWS_16 = 1024
"""The same in bfloat16, half as large each: the gradients of a pass are added to float32 ones, which costs as much as
100 rows."""
LOGIT_ROWS = 1024
"""Rows of logits that exist at a time, with their gradient: 100 MB each for 49,152 tokens in bfloat16."""
LOSS_ROWS = 16
"""Rows whose losses are computed at a time, from a few float32 copies of their logits: 3 MB each for 49,152 tokens."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Training examples of one pass."""

    examples: tuple[TrainingExample, ...]

    def rows(self, number: int, at_N: np.ndarray) -> np.ndarray:
        """Return the rows behind the context in which these ids of one example stand."""
        start = self.examples[number].num_context
        if len(at_N) and at_N.min() < start:
            raise ContractError(f"a target looks at id {at_N.min()} of a record, its first {start} are context")
        before = sum(len(each.ids_T) - each.num_context for each in self.examples[:number])
        return at_N - start + before

    def texts(self) -> PackedTexts:
        """Return the examples' ids as one pass of the drafter."""
        contexts = [slice(0, each.num_context) for each in self.examples]
        answers = [slice(each.num_context, None) for each in self.examples]
        parts = [(number, part) for parts in (contexts, answers) for number, part in enumerate(parts)]
        positions = [np.arange(len(each.ids_T)) for each in self.examples]
        ids_R = [self.examples[number].ids_T[part] for number, part in parts]
        return PackedTexts(
            ids_R=torch.from_numpy(np.concatenate(ids_R)),
            text_R=torch.from_numpy(np.repeat([number for number, _ in parts], [len(ids) for ids in ids_R])),
            position_R=torch.from_numpy(np.concatenate([positions[number][part] for number, part in parts])),
            num_context=sum(each.num_context for each in self.examples),
        )


def pack(examples: Sequence[TrainingExample], precision: Precision) -> Iterator[PackedBatch]:
    """Yield batches of all examples in order, as many to a batch as a pass in this precision holds."""
    most = PASS_ROWS_16 if precision == "bfloat16" else PASS_ROWS
    packed: list[TrainingExample] = []
    num_rows = 0
    for example in examples:
        rows = len(example.ids_T) - example.num_context
        if packed and num_rows + rows > most:
            yield PackedBatch(tuple(packed))
            packed, num_rows = [], 0
        packed.append(example)
        num_rows += rows
    if packed:
        yield PackedBatch(tuple(packed))


def collate(batch: PackedBatch, kinds: Iterable[Kind]) -> tuple[Tensor, dict[Kind, LossTargets[Tensor]]]:
    """Return the rows of a pass that these losses look at, rising, and the targets of each kind that occurs.

    The targets' rows count among the returned ones.
    """
    joined = {kind: join(batch, [each.targets.get(kind) for each in batch.examples]) for kind in kinds}
    present = {kind: targets for kind, targets in joined.items() if targets is not None}
    spans = [
        torch.arange(first, last + 1)
        for targets in present.values()
        for first, last in zip(targets.row_N.tolist(), targets.last_row_N.tolist(), strict=True)
    ]
    rows_N = torch.unique(torch.cat(spans)) if spans else torch.zeros(0, dtype=torch.int64)  # sorted
    return rows_N, {
        kind: replace(targets, row_N=torch.searchsorted(rows_N, targets.row_N)) for kind, targets in present.items()
    }


def join(batch: PackedBatch, parts: Sequence[Targets[np.ndarray] | None]) -> Any:
    """Return the targets of all examples of a batch as one of the same class, over tensors and in rows of the pass.

    None when no example has any. Fields without a row per target are the same in all examples.
    """
    present = {number: part for number, part in enumerate(parts) if part is not None}
    if not present:
        return None
    first = next(iter(present.values()))
    joined = {name: _concatenated([getattr(part, name) for part in present.values()]) for name in first.columns()}
    joined["row_N"] = np.concatenate([batch.rows(number, part.row_N) for number, part in present.items()])
    return replace(first, **joined).tensors()


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return one array of all rows; narrower ones are padded with zeros, ids with copies of their last column."""
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    mode: Literal["edge", "constant"] = "edge" if parts[0].dtype == np.int64 else "constant"
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), mode=mode) for part in parts])
