"""A decoder computed by kernels/, and the KV backend of one text.

Shapes: R rows of a pass, C slots, K key heads, D head size, V vocabulary, H hidden size.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate, count, groupby, repeat
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omnidraft.errors import ContractError
from omnidraft.models.kv_session import PassSegment
from omnidraft.models.native import library as native
from omnidraft.models.native.factors import PackedFactors
from omnidraft.models.native.packed_model import PackedModel
from omnidraft.models.native.thread_count import ThreadCount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CAPACITY_STEP = 512
"""Slots are allocated in multiples of it; it is one of 16, since kernels write the scores of so many slots at once."""
MAX_ROWS = 64
"""Maximum number of rows of a pass, enough to make reading the weights cheap beside computing with them."""


class NativeModel:
    """A model at one set of weights, for many texts."""

    def __init__(
        self,
        model: "PreTrainedModel | PackedModel",
        precision: str,
        library: native.Library,
        *,
        takes_all_threads: bool = False,
    ) -> None:
        """
        Args:
            model: one that description.Described reads, which is packed in memory here, or one that is packed already.
            precision: `int8` and `int4` round weights to levels per group, and activations to 8 bits with a step for
                every 64 or 32 of them; the others keep activations exact.
            library: a build of our kernels that works here; see library.load.
            takes_all_threads: compute on all threads even while other processes keep the cores busy, for a measurement
                of the machine.
        """
        self._library = library
        self._takes_all_threads = takes_all_threads
        self._weights = model if isinstance(model, PackedModel) else _packed(model, precision, library)
        self.bits = native.bits(library, precision)
        """Names the arithmetic, on which bits depend besides the weights."""
        sizes = self._weights.sizes
        self.vocab_size = sizes.vocabulary
        self._values_per_slot = sizes.values_per_slot
        self.hidden_size = sizes.hidden
        self.first_context, self.context_limit = sizes.first_context, sizes.context_limit
        self._free: list[tuple[int, int, torch.Tensor]] = []
        """Memory of passes that ended, with its size and address: as many pieces as ran at the same time, whatever the
        number of texts."""
        self._threads = ThreadCount()
        self._scratch_bytes = cache(partial(library.omnidraft_scratch_bytes, self._weights.struct, MAX_ROWS))

    def open(self, capacity: int = 0, **options: Any) -> "NativeKvBackend":
        """See kv_session.KvModel."""
        return NativeKvBackend(self, capacity, **options)

    def forward(self, segments: Sequence[PassSegment]) -> list[torch.Tensor]:
        """See kv_session.KvModel. Raises ContractError."""
        return list(map(torch.from_numpy, self.forward_arrays(segments)))

    def forward_arrays(self, segments: Sequence[PassSegment]) -> list[np.ndarray]:
        """See kv_session.KvModel. Raises ContractError."""
        for segment in segments:
            segment.backend.require_room(segment)
        sizes = [segment.num_logits for segment in segments]
        keeps_hidden = any(segment.backend.keeps_hidden for segment in segments)
        logits_RV = np.empty((sum(sizes), self.vocab_size), np.float32)
        hidden_RH = torch.empty(sum(sizes), self.hidden_size, dtype=torch.float32) if keeps_hidden else None
        first_row = 0
        for group in _passes(segments):
            self.compute(group, logits_RV, hidden_RH, first_row)
            first_row += sum(segment.num_logits for segment in group)
        if hidden_RH is not None:
            for segment, hidden in zip(segments, hidden_RH.split(sizes), strict=True):
                segment.backend.hidden_RH = hidden
        return [logits_RV[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]

    def slots(self, capacity: int) -> torch.Tensor:
        """Return empty keys and values, [2, K, C * D] of each layer that stores them; the keys of eight slots are
        interleaved. The system zeroes a page when it is first used, and most of a text's slots are not at once."""
        dtype = self._weights.kv_dtype
        num_bytes = capacity * self._values_per_slot * dtype.itemsize
        return torch.frombuffer(mmap(-1, num_bytes), dtype=dtype) if num_bytes else torch.empty(0, dtype=dtype)

    def copy_slots(self, source: torch.Tensor, to: torch.Tensor, num_slots: int) -> None:
        """Copy the first slots, so many of which are whole groups of interleaved keys, to other slots."""
        old, new = (len(each) // self._values_per_slot for each in (source, to))
        first = 0
        for size, layers in groupby(self._weights.sizes.layers, lambda layer: layer.head_size):
            count = sum(layer.values_per_slot for layer in layers) // size
            views = [
                kv[first * capacity :][: count * size * capacity].view(count, capacity * size)
                for kv, capacity in ((to, new), (source, old))
            ]
            views[0][:, : num_slots * size] = views[1][:, : num_slots * size]
            first += count * size

    def kv_bytes(self, num_ids: int) -> int:
        """Return the memory of the keys and values of a text of so many ids."""
        size_of_slot = self._values_per_slot * self._weights.kv_dtype.itemsize
        return _round_up(num_ids, _CAPACITY_STEP) * size_of_slot

    def compute(
        self,
        segments: Sequence[PassSegment],
        logits_RV: np.ndarray,
        hidden_RH: torch.Tensor | None = None,
        first_row: int = 0,
    ) -> None:
        """Compute one pass over the rows of several texts, without the interpreter's lock. The results of a text do not
        depend on the other texts.

        Args:
            logits_RV: the output, from `first_row` on: `num_logits` last rows of each segment, in order.
            hidden_RH: the output for the normed last hidden states of the same rows; None needs none.
        """
        unscored: list[tuple[int, int, int]] = []
        scored: list[tuple[int, int, int]] = []
        for text, each in enumerate(segments):
            rows = list(zip(each.ids, repeat(text), count(each.num_before)))
            unscored += rows[: len(rows) - each.num_logits]
            scored += rows[len(rows) - each.num_logits :]
        ids, texts, nodes = zip(*unscored, *scored, strict=True)
        limit = torch.get_num_threads()
        threads = limit if self._takes_all_threads else self._threads.choose(limit)
        capacity = max([segment.backend.capacity for segment in segments])
        rank = max([segment.backend.rank for segment in segments])
        scratch = self._take_scratch(capacity, rank, threads)
        to_row = torch.float32.itemsize * first_row
        try:
            self._library.omnidraft_forward(
                self._weights.struct,
                native.PassStruct(
                    rows=len(ids),
                    logit_rows=len(scored),
                    capacity=capacity,
                    rank=rank,
                    threads=threads,
                    ids=_ints(ids),
                    texts=_ints(texts),
                    nodes=_ints(nodes),
                    text=(native.TextStruct * len(segments))(*map(_text_struct, segments)),
                    scratch=scratch[1],
                    logits=logits_RV.__array_interface__["data"][0] + to_row * self.vocab_size,
                    hidden=None if hidden_RH is None else hidden_RH.data_ptr() + to_row * self.hidden_size,
                ),
                self._threads.spent_s,
            )
        finally:
            self._free.append(scratch)

    def pack_factors(self, tensors: Mapping[str, torch.Tensor]) -> PackedFactors:
        """See kv_session.KvModel."""
        return PackedFactors(self._weights.sizes, tensors)

    def _take_scratch(self, capacity: int, rank: int, threads: int) -> tuple[int, int, torch.Tensor]:
        """Return the memory of a pass of any number of rows, with any content. Any thread may take some."""
        num_bytes = self._scratch_bytes(capacity, rank, threads)
        with suppress(IndexError):
            if (scratch := self._free.pop())[0] >= num_bytes:
                return scratch
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return num_bytes, memory.data_ptr(), memory

    def move(self, kv: torch.Tensor, capacity: int, sources: Sequence[int], start: int) -> None:
        """See kv_session.KvBackend."""
        self._library.omnidraft_move(self._weights.struct, kv.data_ptr(), capacity, _ints(sources), len(sources), start)


def _packed(model: "PreTrainedModel", precision: str, library: native.Library) -> PackedModel:
    from omnidraft.models.native.weights import packed_in_memory  # transformers, which packed weights do not need

    return packed_in_memory(model, precision, library)


def _text_struct(segment: PassSegment) -> native.TextStruct:
    backend = segment.backend
    return native.TextStruct(
        length=segment.length,
        capacity=backend.capacity,
        parents=_ints(range(-1, len(segment.ids) - 1) if segment.parents is None else segment.parents),
        kv=backend.kv_address,
        factors=None if backend.factors is None else ctypes.pointer(backend.factors.struct),
        rotation_offset=backend.rotation_offset,
    )


def _passes(segments: Sequence[PassSegment]) -> Iterator[list[PassSegment]]:
    """Yield the segments of each pass; one that does not fit is split."""
    group: list[PassSegment] = []
    num_left = MAX_ROWS
    for segment in segments:
        rest = segment
        while len(rest.ids) > num_left:
            if num_left:
                first, rest = rest.split(num_left)
                group.append(first)
            yield group
            group, num_left = [], MAX_ROWS
        group.append(rest)
        num_left -= len(rest.ids)
    if group:
        yield group


class NativeKvBackend:
    """Implements kv_session.KvBackend."""

    def __init__(
        self,
        model: NativeModel,
        capacity: int,
        *,
        keeps_hidden: bool = False,
        factors: PackedFactors | None = None,
        rotation_offset: int = 0,
    ) -> None:
        """See kv_session.KvModel."""
        self._model = model
        self.factors = factors
        self.rank = 0 if factors is None else factors.rank
        self.rotation_offset = rotation_offset
        self.keeps_hidden = keeps_hidden
        self.hidden_RH = torch.empty(0, model.hidden_size, dtype=torch.float32)
        self.capacity = 0
        self.kv = model.slots(0)
        self.kv_address = 0
        if capacity:
            self._grow(capacity)

    def require_room(self, segment: PassSegment) -> None:
        """Allocate slots for the segment's keys. Raises ContractError."""
        ids, needed = segment.ids, segment.end
        limit = self._model.context_limit if self.rotation_offset else self._model.first_context
        if not (needed <= limit and min(ids) >= 0 and max(ids) < self._model.vocab_size):
            raise ContractError(f"{needed} ids or an id of {list(ids)}: more than this model's tables hold")
        if needed > self.capacity:
            self._grow(needed)

    def move(self, sources: Sequence[int], start: int) -> None:
        if list(sources) != list(range(start, start + len(sources))):
            self._model.move(self.kv, self.capacity, sources, start)

    def copy(self, source: "NativeKvBackend", num_ids: int) -> None:
        """Copy the keys and values of the first `num_ids` ids of another text."""
        if num_ids > self.capacity:
            self._grow(num_ids)
        num_slots = min(_round_up(num_ids, native.SLOTS_TOGETHER), source.capacity)
        self._model.copy_slots(source.kv, self.kv, num_slots)

    def _grow(self, needed: int) -> None:
        capacity = max(self.capacity, _round_up(needed, _CAPACITY_STEP))
        larger = self._model.slots(capacity)
        self._model.copy_slots(self.kv, larger, self.capacity)
        self.kv, self.kv_address, self.capacity = larger, larger.data_ptr(), capacity


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _ints(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int]":
    return (ctypes.c_int * len(values))(*values)
