"""A Llama-family model behind llama.cpp, and the keys of one text: which rows a pass computes, and in what memory.

Shapes: R rows of a pass, C slots, L layers, K key heads, D head size, V vocabulary, H hidden size.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from omnidraft.errors import ContractError
from omnidraft.models.native import library as native
from omnidraft.models.native.weights import PackedLlama

_CAPACITY_STEP = 512
_MAX_ROWS = 64
"""Rows of one pass at most: enough for reading the weights to be cheap beside computing with them."""


class NativeLlama:
    """A model at one set of weights; many texts."""

    def __init__(self, model: PreTrainedModel, precision: str, folder: Path | None = None) -> None:
        """
        Args:
            model: one that weights.is_supported.
            precision: `int8` and `int4` round weights per group and activations to 16 bits; the others keep activations
                exact.
            folder: where the compiled library is, or goes to; None: the user's cache.

        Raises:
            ModelError: there is no library, and none can be compiled.
        """
        self._library = native.load(folder)
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

    def forward(self, rows: native.Pass) -> None:
        """Without the interpreter's lock."""
        self._library.omnidraft_forward(self._weights.struct, rows)

    def move(self, kv: torch.Tensor, capacity: int, sources: Sequence[int], start: int) -> None:
        """See branches.Rows."""
        self._library.omnidraft_move(self._weights.struct, kv.data_ptr(), capacity, _ints(sources), len(sources), start)


class NativeRows:
    """Implements branches.Rows."""

    def __init__(self, model: NativeLlama, capacity: int = 0, *, keeps_hidden: bool = False) -> None:
        """
        Args:
            capacity: slots to begin with; more are made when they are needed.
            keeps_hidden: False leaves `hidden_RH` empty.
        """
        self._model = model
        self._keeps_hidden = keeps_hidden
        self.hidden_RH = self._hidden_of(0)
        self._capacity = self._threads = 0
        self._kv = model.slots(0)
        if capacity:
            self._make_room(capacity, torch.get_num_threads())

    def fill(self, start: int, ids: Sequence[int]) -> None:
        """Keys of these ids, which follow the first `start` ids of the text."""
        self._chain(start, ids, 0)

    def chain(self, start: int, ids: Sequence[int]) -> torch.Tensor:
        return self._chain(start, ids, 1)[0]

    def tree(self, length: int, parents: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        before = len(parents) - len(ids)
        logits_RV, self.hidden_RH = self._logits_of(len(ids)), self._hidden_of(len(ids))
        for first in range(0, len(ids), _MAX_ROWS):
            few = slice(first, min(first + _MAX_ROWS, len(ids)))
            self._pass(length, parents[: before + few.stop], ids[few], logits_RV[few], self.hidden_RH[few])
        return logits_RV

    def move(self, sources: Sequence[int], start: int) -> None:
        if list(sources) != list(range(start, start + len(sources))):
            self._model.move(self._kv, self._capacity, sources, start)

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
        return torch.empty(num_rows if self._keeps_hidden else 0, self._model.hidden_size, dtype=torch.float32)

    def _pass(
        self,
        length: int,
        parents: Sequence[int],
        ids: Sequence[int],
        logits_RV: torch.Tensor,
        hidden_RH: torch.Tensor,
    ) -> None:
        needed, threads = length + len(parents), torch.get_num_threads()
        if not (needed <= self._model.context_limit and min(ids) >= 0 and max(ids) < self._model.vocab_size):
            raise ContractError(f"{needed} ids or an id of {list(ids)}: more than this model's tables hold")
        if needed > self._capacity or threads > self._threads:
            self._make_room(needed, threads)
        self._model.forward(
            native.Pass(
                length=length,
                behind=len(parents),
                rows=len(ids),
                logit_rows=len(logits_RV),
                capacity=self._capacity,
                threads=threads,
                ids=_ints(ids),
                parents=_ints(parents),
                kv=self._kv.data_ptr(),
                scratch=self._scratch.data_ptr(),
                logits=logits_RV.data_ptr(),
                hidden=hidden_RH.data_ptr() if len(hidden_RH) else None,
            )
        )

    def _make_room(self, needed: int, threads: int) -> None:
        capacity = max(self._capacity, -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP)
        larger = self._model.slots(capacity)
        larger[..., : self._kv.shape[-1]] = self._kv
        self._kv, self._capacity, self._threads = larger, capacity, threads
        self._scratch = self._model.scratch(capacity, threads)


def _ints(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int]":
    return (ctypes.c_int * len(values))(*values)
