"""A Llama-family model behind kernels.cpp, and the keys of one text: which rows a pass computes, and in what memory.

Shapes: R rows of a pass, C slots, L layers, K key heads, D head size, V vocabulary, H hidden size.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedModel

from omnidraft.errors import ContractError
from omnidraft.models.kv_session import ForwardRequest
from omnidraft.models.native import library as native
from omnidraft.models.native.weights import PackedLlama

_CAPACITY_STEP = 512
_MAX_ROWS = 64
"""Rows of one pass at most: enough for reading the weights to be cheap beside computing with them."""
_MAX_ROWS_OF_TEXT = 16
"""Of one text, in a pass over several."""


class NativeLlama:
    """A model at one set of weights; many texts."""

    def __init__(self, model: PreTrainedModel, precision: str, library: native.Library) -> None:
        """
        Args:
            model: one that weights.is_supported.
            precision: `int8` and `int4` round weights per group and activations to 16 bits; the others keep activations
                exact.
            library: a build of our kernels that works here; see library.load.
        """
        self._library = library
        self._weights = PackedLlama(model, precision, self._library)
        self.build = Path(self._library._name).stem[:18]
        """Names source, compiler and processor: what bits depend on besides the weights."""
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.context_limit: int = model.config.max_position_embeddings

    def slots(self, capacity: int) -> torch.Tensor:
        """Empty keys and values. [L, 2, K, C * D]: keys of eight slots lie interleaved"""
        sizes = self._weights.struct
        return torch.zeros(sizes.layers, 2, sizes.keys, capacity * sizes.head_size, dtype=self._weights.kv_dtype)

    def scratch(self, capacity: int, threads: int) -> torch.Tensor:
        """Memory that a pass of any number of rows computes in."""
        size = self._library.omnidraft_scratch_bytes(self._weights.struct, _MAX_ROWS, capacity, threads)
        return torch.empty(size, dtype=torch.uint8)

    def compute(self, parts: Sequence["PassSegment"], logits_RV: torch.Tensor, hidden_RH: torch.Tensor) -> None:
        """One pass over the rows of several texts, without the interpreter's lock. What a text's rows give does not
        depend on the other texts.

        Args:
            logits_RV: written; the parts' last rows in their order, as many of each as it asks for.
            hidden_RH: the same for the normed last hidden states; may be empty.
        """
        silent = [(number, node) for number, part in enumerate(parts) for node in part.nodes[: part.num_without_logits]]
        heard = [(number, node) for number, part in enumerate(parts) for node in part.nodes[part.num_without_logits :]]
        texts, nodes = zip(*silent, *heard, strict=True)
        largest = max((part.backend for part in parts), key=lambda rows: rows.capacity)
        self._library.omnidraft_forward(
            self._weights.struct,
            native.PassStruct(
                rows=len(nodes),
                logit_rows=len(heard),
                capacity=largest.capacity,
                threads=largest.threads,
                ids=_ints([parts[text].ids[node - parts[text].nodes[0]] for text, node in (*silent, *heard)]),
                texts=_ints(texts),
                nodes=_ints(nodes),
                text=(native.TextStruct * len(parts))(*(part.struct for part in parts)),
                scratch=largest.scratch.data_ptr(),
                logits=logits_RV.data_ptr(),
                hidden=hidden_RH.data_ptr() if len(hidden_RH) else None,
            ),
        )

    def move(self, kv: torch.Tensor, capacity: int, sources: Sequence[int], start: int) -> None:
        """See branches.Rows."""
        self._library.omnidraft_move(self._weights.struct, kv.data_ptr(), capacity, _ints(sources), len(sources), start)


@dataclass(frozen=True, slots=True)
class PassSegment:
    """What a pass computes of one text: the last `ids` of a tree of `parents` behind its first `length` ids."""

    backend: "NativeKvBackend"
    length: int
    parents: Sequence[int]
    ids: Sequence[int]
    num_logits: int
    """Of the last of these ids."""

    @property
    def nodes(self) -> range:
        return range(len(self.parents) - len(self.ids), len(self.parents))

    @property
    def num_without_logits(self) -> int:
        return len(self.ids) - self.num_logits

    @property
    def struct(self) -> native.TextStruct:
        return native.TextStruct(
            length=self.length,
            capacity=self.backend.capacity,
            parents=_ints(self.parents),
            kv=self.backend.kv.data_ptr(),
        )


def compute_batch(model: NativeLlama, wanted: Sequence[tuple["NativeKvBackend", ForwardRequest]]) -> list[torch.Tensor]:
    """What `Rows.compute` gives for each of these texts, none of them twice, in as few passes as can be."""
    parts = [rows.final_segment(each) for rows, each in wanted]
    logits: list[torch.Tensor] = []
    while parts:
        num_rows = list(accumulate(len(part.ids) for part in parts))
        few = parts[: max(bisect_right(num_rows, _MAX_ROWS), 1)]
        logits += _compute_pass(model, few)
        parts = parts[len(few) :]
    return logits


def _compute_pass(model: NativeLlama, parts: Sequence[PassSegment]) -> Sequence[torch.Tensor]:
    sizes = [part.num_logits for part in parts]
    keeps_hidden = any(part.backend.keeps_hidden for part in parts)
    logits_RV = torch.empty(sum(sizes), model.vocab_size, dtype=torch.float32)
    hidden_RH = torch.empty(sum(sizes) if keeps_hidden else 0, model.hidden_size, dtype=torch.float32)
    model.compute(parts, logits_RV, hidden_RH)
    for part, hidden in zip(parts, hidden_RH.split(sizes), strict=True) if keeps_hidden else ():
        part.backend.hidden_RH = hidden
    return logits_RV.split(sizes)


class NativeKvBackend:
    """Implements branches.Rows."""

    def __init__(self, model: NativeLlama, capacity: int = 0, *, keeps_hidden: bool = False) -> None:
        """
        Args:
            capacity: slots to begin with; more are made when they are needed.
            keeps_hidden: False leaves `hidden_RH` empty.
        """
        self._model = model
        self.keeps_hidden = keeps_hidden
        self.hidden_RH = self._hidden_of(0)
        self.capacity = self.threads = 0
        self.kv = model.slots(0)
        if capacity:
            self._grow(capacity, torch.get_num_threads())

    def compute(self, wanted: ForwardRequest) -> torch.Tensor:
        if wanted.parents is None:
            return self._chain(wanted.length, wanted.ids, 1)
        return self.tree(wanted.length, wanted.parents, wanted.ids)

    def final_segment(self, wanted: ForwardRequest) -> PassSegment:
        """What one pass computes of it; of a long chain all but the end is computed now."""
        if wanted.parents is not None:
            return self.segment(wanted.length, wanted.parents, wanted.ids, len(wanted.ids))
        num_before = max(len(wanted.ids) - _MAX_ROWS_OF_TEXT, 0)
        if num_before:
            self.fill(wanted.length, wanted.ids[:num_before])
        ids = wanted.ids[num_before:]
        return self.segment(wanted.length + num_before, range(-1, len(ids) - 1), ids, 1)

    def fill(self, start: int, ids: Sequence[int]) -> None:
        """Keys of these ids, which follow the first `start` ids of the text."""
        self._chain(start, ids, 0)

    def tree(self, length: int, parents: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        before = len(parents) - len(ids)
        logits_RV, self.hidden_RH = self._logits_of(len(ids)), self._hidden_of(len(ids))
        for first in range(0, len(ids), _MAX_ROWS):
            few = slice(first, min(first + _MAX_ROWS, len(ids)))
            self._pass(length, parents[: before + few.stop], ids[few], logits_RV[few], self.hidden_RH[few])
        return logits_RV

    def move(self, sources: Sequence[int], start: int) -> None:
        if list(sources) != list(range(start, start + len(sources))):
            self._model.move(self.kv, self.capacity, sources, start)

    def _chain(self, start: int, ids: Sequence[int], num_logits: int) -> torch.Tensor:
        """Logits of the last row, or of none."""
        logits_RV, self.hidden_RH = self._logits_of(num_logits), self._hidden_of(num_logits)
        for first in range(0, len(ids), _MAX_ROWS):
            few = ids[first : first + _MAX_ROWS]
            said = slice(num_logits if first + len(few) == len(ids) else 0)
            self._pass(start + first, range(-1, len(few) - 1), few, logits_RV[said], self.hidden_RH[said])
        return logits_RV

    def _logits_of(self, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows, self._model.vocab_size, dtype=torch.float32)

    def _hidden_of(self, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows if self.keeps_hidden else 0, self._model.hidden_size, dtype=torch.float32)

    def _pass(
        self,
        length: int,
        parents: Sequence[int],
        ids: Sequence[int],
        logits_RV: torch.Tensor,
        hidden_RH: torch.Tensor,
    ) -> None:
        self._model.compute([self.segment(length, parents, ids, len(logits_RV))], logits_RV, hidden_RH)

    def segment(self, length: int, parents: Sequence[int], ids: Sequence[int], num_logits: int) -> PassSegment:
        """Of a pass, with room made for its keys. Raises ContractError."""
        needed, threads = length + len(parents), torch.get_num_threads()
        if not (needed <= self._model.context_limit and min(ids) >= 0 and max(ids) < self._model.vocab_size):
            raise ContractError(f"{needed} ids or an id of {list(ids)}: more than this model's tables hold")
        if needed > self.capacity or threads > self.threads:
            self._grow(needed, threads)
        return PassSegment(self, length, parents, ids, num_logits)

    def _grow(self, needed: int, threads: int) -> None:
        capacity = max(self.capacity, -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP)
        larger = self._model.slots(capacity)
        larger[..., : self.kv.shape[-1]] = self.kv
        self.kv, self.capacity, self.threads = larger, capacity, threads
        self.scratch = self._model.scratch(capacity, threads)


def _ints(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int]":
    return (ctypes.c_int * len(values))(*values)
