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

from omnidraft.errors import ConfigError, ContractError, ModelError

CELL_STEP = 256
"""llama.cpp reads its cells in multiples of this."""


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One id of a pass."""

    token: int
    position: int
    sequences: tuple[int, ...] = (0,)


def library() -> ModuleType:
    """Return the bindings, with only errors logged. Raises ConfigError when they are not installed."""
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    try:
        import llama_cpp
    except ImportError as exc:
        raise ConfigError(
            f"models.engine = 'llamacpp' needs llama-cpp-python: pip install 'omnidraft[llamacpp]' ({exc})"
        ) from exc
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
            raise ModelError(f"{gguf.name} has recurrent layers, whose state cannot be taken back when a draft fails")
        self._vocabulary = lib.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = lib.llama_vocab_n_tokens(self._vocabulary)
        self.context_limit: int = lib.llama_model_n_ctx_train(self.pointer)
        head_size = lib.llama_model_n_embd(self.pointer) // lib.llama_model_n_head(self.pointer)
        num_key_heads = lib.llama_model_n_head_kv(self.pointer)
        self.num_key_numbers: int = lib.llama_model_n_layer(self.pointer) * num_key_heads * head_size
        """The size of the keys of one id."""

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
            max_rows: maximum number of entries of a pass.
            bits: bits of each number of keys and values, 16 or 32.

        Raises:
            ModelError: there is no memory for so many cells.
        """
        self._model = model
        self._lib = lib = model.lib
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

    def decode(self, entries: Sequence[BatchEntry], *, has_logits: bool) -> torch.Tensor | None:
        """Run one pass, which fills a cell for each entry; return the logits float32 [N, V] if `has_logits`."""
        self._fill(entries, has_logits)
        failure = self._lib.llama_decode(self._pointer, self._batch)
        if failure:
            raise ContractError(f"llama.cpp refused a pass over {len(entries)} tokens: llama_decode gave {failure}")
        if not has_logits:
            return None
        rows_NV = self._lib.llama_get_logits(self._pointer)
        return torch.from_numpy(np.ctypeslib.as_array(rows_NV, (len(entries), self._model.vocab_size)).copy())

    def _fill(self, entries: Sequence[BatchEntry], has_logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, entry in enumerate(entries):
            batch.token[row] = entry.token
            batch.pos[row] = entry.position
            batch.n_seq_id[row] = len(entry.sequences)
            for index, sequence in enumerate(entry.sequences):
                batch.seq_id[row][index] = sequence
            batch.logits[row] = has_logits

    def share(self, source: int, other: int, start: int = 0) -> None:
        """Add the cells of `source` from position `start` on to sequence `other`."""
        self._lib.llama_memory_seq_cp(self._memory, source, other, start, -1)

    def cut(self, sequence: int, start: int) -> None:
        """Remove a sequence's cells from position `start` on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def keep_only(self, sequence: int) -> None:
        """Empty all other sequences."""
        self._lib.llama_memory_seq_keep(self._memory, sequence)

    def close(self) -> None:
        """Free the cells. Closing twice is allowed."""
        self._release()


def _release(lib: ModuleType, pointer: Any, batch: Any) -> None:
    lib.llama_batch_free(batch)
    lib.llama_free(pointer)
