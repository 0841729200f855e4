"""A llama.cpp model and its contexts, with the few calls that a target needs; no other file calls llama.cpp.

A context has cells, each with the key and value of one id at one position. A cell belongs to one or more sequences;
an id sees the earlier cells of its own sequences.
Shapes: N entries of a pass, V vocabulary.
"""

import ctypes
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from omnidraft import extras
from omnidraft.errors import ContractError, ModelError

CELL_STEP = 256
"""llama.cpp reads its cells in multiples of this."""
MAX_SEQUENCES = 128
"""Sequences of one context, which llama.cpp wants to be no more than the rows of a pass."""


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One id of a pass."""

    token: int
    position: int
    sequences: tuple[int, ...] = (0,)
    has_logits: bool = True


def library() -> ModuleType:
    """Return the bindings, with only errors logged. Raises ExtraMissing when they are not installed."""
    extras.require("llamacpp", "models.engine = 'llamacpp'")
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    import llama_cpp

    llama_cpp.llama_backend_init()
    return llama_cpp


class LlamaModel:
    """A GGUF file loaded by llama.cpp."""

    def __init__(self, gguf: Path) -> None:
        """Raises ModelError when llama.cpp cannot load the file, or cannot remove rejected drafts."""
        self.lib = lib = library()
        self.pointer: Any = lib.llama_model_load_from_file(str(gguf).encode(), lib.llama_model_default_params())
        if not self.pointer:
            raise ModelError(f"llama.cpp cannot load {gguf}; its messages are on stderr")
        weakref.finalize(self, lib.llama_model_free, self.pointer)
        if lib.llama_model_is_recurrent(self.pointer) or lib.llama_model_is_hybrid(self.pointer):
            raise ModelError(
                f"{gguf.name} has recurrent layers, whose state llama.cpp cannot take back when a draft fails; leave "
                "models.engine at 'transformers', which converts most such files and drafts for them"
            )
        self._vocabulary = lib.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = lib.llama_vocab_n_tokens(self._vocabulary)
        self.context_limit: int = lib.llama_model_n_ctx_train(self.pointer)
        key_length = self._metadata(f"{self._metadata('general.architecture')}.attention.key_length")
        head_size = int(key_length or lib.llama_model_n_embd(self.pointer) // lib.llama_model_n_head(self.pointer))
        num_key_heads = lib.llama_model_n_head_kv(self.pointer)
        self.num_key_numbers: int = lib.llama_model_n_layer(self.pointer) * num_key_heads * head_size
        """The size of the keys of one id."""
        self.min_cells = self._length_of_short_factors() + CELL_STEP
        """The fewest cells of a context. A model with long and short factors of its rotary frequencies takes the short
        ones in a small context and the long ones in a large one; contexts grow with the texts in them, and what a text
        says must not depend on the others, nor its factors change while it lasts: so all contexts are large."""

    def _length_of_short_factors(self) -> int:
        """Return how many cells the largest context with short factors has; 0 for a model without two kinds."""
        scaling = f"{self._metadata('general.architecture')}.rope.scaling"
        has_two = self._metadata(f"{scaling}.attn_factor") or self._metadata(f"{scaling}.type") == "longrope"
        return int(self._metadata(f"{scaling}.original_context_length") or 0) if has_two else 0

    def _metadata(self, key: str) -> str:
        """Return a value of the file's metadata, empty where it has none."""
        buffer = ctypes.create_string_buffer(128)
        length = self.lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode() if length > 0 else ""

    def piece(self, token: int) -> bytes:
        """Return the bytes of an id; special tokens have none."""
        buffer = ctypes.create_string_buffer(1024)
        length = self.lib.llama_token_to_piece(self._vocabulary, token, buffer, len(buffer), 0, False)
        return buffer.raw[: max(length, 0)]


class Context:
    """The cells of a model and passes over them. One thread at a time."""

    def __init__(
        self, model: LlamaModel, num_cells: int, *, max_rows: int, num_sequences: int, threads: int, bits: int = 16
    ) -> None:
        """
        Args:
            num_cells: at least; a model may need more.
            max_rows: maximum number of entries that are computed at once.
            bits: bits of each number of keys and values, 16 or 32.

        Raises:
            ModelError: there is no memory for so many cells.
        """
        self._model = model
        self._lib = lib = model.lib
        self.num_cells = num_cells = max(num_cells, model.min_cells)
        self._max_rows = max_rows
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = num_cells, max_rows, max_rows
        params.n_seq_max, params.kv_unified, params.swa_full = num_sequences, True, True
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = lib.GGML_TYPE_F32 if bits == 32 else lib.GGML_TYPE_F16
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._pointer: Any = lib.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise ModelError(f"llama.cpp cannot make a context of {num_cells} cells; its messages are on stderr")
        self._memory = lib.llama_get_memory(self._pointer)
        self._batch = lib.llama_batch_init(max_rows, 0, num_sequences)
        self._release = weakref.finalize(self, _release, lib, self._pointer, self._batch)

    def decode(self, entries: Sequence[BatchEntry]) -> torch.Tensor:
        """Fill a cell for each entry; return the logits float32 [N, V] of those that have logits."""
        parts = [self._decode(entries[i : i + self._max_rows]) for i in range(0, len(entries), self._max_rows)]
        return torch.cat(parts)

    def _decode(self, entries: Sequence[BatchEntry]) -> torch.Tensor:
        self._fill(entries)
        failure = self._lib.llama_decode(self._pointer, self._batch)
        if failure:
            raise ContractError(f"llama.cpp refused a pass over {len(entries)} tokens: llama_decode gave {failure}")
        num_logits = sum(entry.has_logits for entry in entries)
        if not num_logits:
            return torch.empty(0, self._model.vocab_size, dtype=torch.float32)
        rows_NV = self._lib.llama_get_logits(self._pointer)
        return torch.from_numpy(np.ctypeslib.as_array(rows_NV, (num_logits, self._model.vocab_size)).copy())

    def _fill(self, entries: Sequence[BatchEntry]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, entry in enumerate(entries):
            batch.token[row] = entry.token
            batch.pos[row] = entry.position
            batch.n_seq_id[row] = len(entry.sequences)
            for index, sequence in enumerate(entry.sequences):
                batch.seq_id[row][index] = sequence
            batch.logits[row] = entry.has_logits

    def share(self, source: int, other: int, start: int = 0, end: int = -1) -> None:
        """Add the cells of `source` from position `start` to before `end` (-1: its last one) to sequence `other`."""
        self._lib.llama_memory_seq_cp(self._memory, source, other, start, end)

    def cut(self, sequence: int, start: int) -> None:
        """Remove a sequence's cells from position `start` on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def length(self, sequence: int) -> int:
        """Return the position after the last cell of a sequence."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def is_whole(self, sequence: int) -> bool:
        """Return whether a sequence has its first cell still, which a sliding window may have given away."""
        return int(self._lib.llama_memory_seq_pos_min(self._memory, sequence)) == 0

    def save(self, sequence: int) -> np.ndarray:
        """Return a copy of the cells of a sequence, for `load`."""
        buffer = np.empty(self._lib.llama_state_seq_get_size(self._pointer, sequence), dtype=np.uint8)
        self._lib.llama_state_seq_get_data(self._pointer, _bytes_at(buffer), buffer.size, sequence)
        return buffer

    def load(self, sequence: int, saved: np.ndarray) -> None:
        """Replace the cells of a sequence. Raises ModelError when they do not fit in."""
        if not self._lib.llama_state_seq_set_data(self._pointer, _bytes_at(saved), saved.size, sequence):
            raise ModelError(f"llama.cpp has no room for {saved.size} bytes of saved keys; its messages are on stderr")

    def close(self) -> None:
        """Free the cells. Closing twice is allowed."""
        self._release()


def _bytes_at(buffer: np.ndarray) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _release(lib: ModuleType, pointer: Any, batch: Any) -> None:
    lib.llama_batch_free(batch)
    lib.llama_free(pointer)
