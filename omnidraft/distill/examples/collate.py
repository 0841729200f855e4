"""What the losses ask for in one pass of the drafter, gathered from its records.

Shapes: R rows of a pass, N positions of one kind, C chunks, L draft ids of the longest, S buckets.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.examples.buckets import Buckets, BucketTargets, certain_buckets
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.training.alm import Chunks
from omnidraft.distill.training.losses import Kind
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
            ids_R=_joined_arrays([group.records[number].ids_T[part] for number, part in places]),
            text_R=_joined_arrays([np.full_like(positions[number][part], number) for number, part in places]),
            position_R=_joined_arrays([positions[number][part] for number, part in places]),
            num_context=sum(starts),
        )
    )


def _num_context(record: TrainingExample) -> int:
    """Ids before the first that is asked about; one less than all when nothing is."""
    asked = [int(at.min()) for at in (record.at_P, record.piece_at_M) if len(at)]
    return min(asked, default=max(len(record.ids_T) - 1, 0))


def _joined_arrays(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


@dataclass(frozen=True, slots=True)
class PointTargets:
    """Positions that look at one row each."""

    first_row_N: Tensor
    """int64, rising."""
    buckets: Buckets

    @property
    def last_row_N(self) -> Tensor:
        return self.first_row_N

    def at(self, here: slice, logits_RV: Tensor, start: int) -> tuple[Tensor, Buckets]:
        """What the loss of these positions takes; the logits begin at row `start`."""
        return logits_RV[self.first_row_N[here] - start], self.buckets[here]

    def moved_to(self, rows_N: Tensor) -> "PointTargets":
        """The same where of all rows only these are left; rising, and every one that is asked among them."""
        return replace(self, first_row_N=torch.searchsorted(rows_N, self.first_row_N))


@dataclass(frozen=True, slots=True)
class ChunkTargets:
    """Chunks, each of which looks at several rows in a run; PointTargets says what the rest means."""

    chunks: Chunks

    @property
    def first_row_N(self) -> Tensor:
        return self.chunks.first_row_C

    @property
    def last_row_N(self) -> Tensor:
        return self.chunks.last_row_C

    def at(self, here: slice, logits_RV: Tensor, start: int) -> tuple[Tensor, Chunks]:
        chunks = self.chunks[here]
        return logits_RV, replace(chunks, first_row_C=chunks.first_row_C - start)

    def moved_to(self, rows_N: Tensor) -> "ChunkTargets":
        return ChunkTargets(replace(self.chunks, first_row_C=torch.searchsorted(rows_N, self.chunks.first_row_C)))


LossTargets = PointTargets | ChunkTargets


def num_targets(record: TrainingExample, kind: Kind) -> int:
    """Positions of this kind in one record."""
    if kind == "chunk":
        return len(record.distribution.chunks.at_C) if record.distribution else 0
    part = _part(record, kind)
    return len(part.at_N) if part else 0


def collate(group: PackedBatch, kinds: Iterable[Kind]) -> tuple[Tensor, dict[Kind, LossTargets]]:
    """The rows of a pass that are asked for, rising, and for each kind that occurs what is asked in terms of these."""
    found = {kind: _chunks(group) if kind == "chunk" else _at_rows(group, kind) for kind in kinds}
    known = {kind: what for kind, what in found.items() if what is not None}
    rows_N = torch.unique(_joined([_rows(what) for what in known.values()]))  # sorted
    return rows_N, {kind: what.moved_to(rows_N) for kind, what in known.items()}


def _rows(what: LossTargets) -> Tensor:
    spans = zip(what.first_row_N.tolist(), what.last_row_N.tolist(), strict=True)
    return _joined([torch.arange(first, last + 1) for first, last in spans])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Part:
    """Of one record."""

    at_N: np.ndarray
    buckets: BucketTargets
    emitted_N: np.ndarray
    rest_D: np.ndarray | None = None


def _part(record: TrainingExample, kind: Kind) -> _Part | None:
    believed = record.distribution
    match kind:
        case "emitted":
            ids_N = record.draft_P[record.is_draftable_P]
            return _Part(record.at_P[record.is_draftable_P], certain_buckets(ids_N, np.zeros(len(ids_N))), ids_N)
        case "piece":
            buckets = certain_buckets(record.piece_ids_M, np.zeros(len(record.piece_ids_M)))
            return _Part(record.piece_at_M, buckets, record.piece_ids_M)
        case _ if believed is None:
            return None
        case "boundary":
            return _Part(record.at_P, believed.buckets, record.draft_P)
        case "direct":
            return _Part(record.at_P, believed.direct, record.draft_P, believed.is_direct_D)
        case "believed piece":
            buckets = certain_buckets(record.piece_ids_M, believed.log_p_P[record.piece_row_M])
            return _Part(record.piece_at_M, buckets, record.piece_ids_M)
        case "rejected":
            rows = believed.rejected_row_N
            return _Part(record.at_P[rows], believed.rejected, record.draft_P[rows])
        case _:
            raise AssertionError(f"{kind} looks at several rows")


def _at_rows(group: PackedBatch, kind: Kind) -> PointTargets | None:
    parts = [(place, part) for place, record in enumerate(group.records) if (part := _part(record, kind))]
    if not parts:
        return None
    rest_D = parts[0][1].rest_D
    return PointTargets(
        _joined([group.rows(place, part.at_N) for place, part in parts]),
        Buckets(
            *_stacked([part.buckets for _, part in parts]),
            emitted_N=_joined([torch.from_numpy(part.emitted_N) for _, part in parts]),
            rest_V=None if rest_D is None else torch.from_numpy(rest_D),
        ),
    )


def _stacked(parts: Sequence[BucketTargets]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of all records of the pass; narrower ones padded with copies of their first column."""
    width = max(part.ids_PS.shape[1] for part in parts)
    return (
        torch.from_numpy(np.concatenate([np.pad(b.ids_PS, _to(width, b.ids_PS), mode="edge") for b in parts])),
        torch.from_numpy(np.concatenate([np.pad(b.log_p_PS, _to(width, b.ids_PS)) for b in parts])),
        torch.from_numpy(np.concatenate([np.pad(b.real_PS, _to(width, b.ids_PS)) for b in parts])),
        torch.from_numpy(np.concatenate([b.log_p_rest_P for b in parts])),
    )


def _to(width: int, columns: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]]:
    return (0, 0), (0, width - columns.shape[1])


def _chunks(group: PackedBatch) -> ChunkTargets | None:
    parts = [(place, one, one.distribution.chunks) for place, one in enumerate(group.records) if one.distribution]
    if not parts:
        return None
    num_ids_C = np.concatenate([chunks.num_ids_C for _, _, chunks in parts])
    place_L = np.arange(1, num_ids_C.max(initial=1) + 1)
    ids = [one.ids_T[np.minimum(c.at_C[:, None] + place_L, len(one.ids_T) - 1)] for _, one, c in parts]
    _, _, first = parts[0]
    return ChunkTargets(
        Chunks(
            first_row_C=_joined([group.rows(place, chunks.at_C) for place, _, chunks in parts]),
            ids_CL=torch.from_numpy(np.concatenate(ids)),
            num_ids_C=torch.from_numpy(num_ids_C),
            log_p_C=torch.from_numpy(np.concatenate([chunks.log_p_C for _, _, chunks in parts])),
            tau=first.tau,
            starts_V=None if first.starts_D is None else torch.from_numpy(first.starts_D),
        )
    )
