"""A drafter of the Llama family whose passes are computed by native/llama.cpp, near the time its memory takes to read.

The drafter may compute in any precision, since it cannot change the text.
Shapes: R rows of a pass, C slots, L layers, K key heads, D head size, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from omnidraft.errors import ContractError
from omnidraft.models import store
from omnidraft.models.attention import has_moving_rope
from omnidraft.models.branches import BranchingSession
from omnidraft.models.native import library as native
from omnidraft.models.native.weights import PackedLlama

_CAPACITY_STEP = 512
_MAX_ROWS = 64
"""Rows of one pass at most: enough for reading the weights to be cheap beside computing with them."""


class LlamaDrafter:
    """Implements ports.DraftModel at one set of weights."""

    def __init__(self, model: LlamaForCausalLM, precision: str, folder: Path | None = None) -> None:
        """
        Args:
            precision: `int8` rounds weights per group and activations to 16 bits; the others keep activations exact.
            folder: where the compiled library is, or goes to; None: the user's cache.

        Raises:
            ModelError: there is no library, and none can be compiled.
        """
        self._library = native.load(folder or store.default_home() / "native")
        self._weights = PackedLlama(model, precision, self._library)
        self.vocab_size: int = model.config.vocab_size
        self.context_limit: int = model.config.max_position_embeddings

    def open(self) -> BranchingSession:
        """See ports.DraftModel."""
        return BranchingSession(_Rows(self))

    def slots(self, capacity: int) -> torch.Tensor:
        """Empty keys and values. [L, 2, K, C * D]: keys of eight slots lie interleaved"""
        sizes = self._weights.struct
        return torch.zeros(sizes.layers, 2, sizes.keys, capacity * sizes.head_size, dtype=self._weights.dtype)

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


class _Rows:
    """Implements branches.Rows."""

    def __init__(self, drafter: LlamaDrafter) -> None:
        self._drafter = drafter
        self._capacity = self._threads = 0
        self._kv = drafter.slots(0)

    def chain(self, start: int, ids: Sequence[int]) -> torch.Tensor:
        logits_1V = torch.empty(1, self._drafter.vocab_size, dtype=torch.float32)
        for first in range(0, len(ids), _MAX_ROWS):
            few = ids[first : first + _MAX_ROWS]
            is_last = first + len(few) == len(ids)
            self._pass(start + first, range(-1, len(few) - 1), few, logits_1V if is_last else logits_1V[:0])
        return logits_1V[0]

    def tree(self, length: int, parents: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        before = len(parents) - len(ids)
        logits_RV = torch.empty(len(ids), self._drafter.vocab_size, dtype=torch.float32)
        for first in range(0, len(ids), _MAX_ROWS):
            end = min(first + _MAX_ROWS, len(ids))
            self._pass(length, parents[: before + end], ids[first:end], logits_RV[first:end])
        return logits_RV

    def move(self, sources: Sequence[int], start: int) -> None:
        if list(sources) != list(range(start, start + len(sources))):
            self._drafter.move(self._kv, self._capacity, sources, start)

    def _pass(self, length: int, parents: Sequence[int], ids: Sequence[int], logits_RV: torch.Tensor) -> None:
        needed, threads = length + len(parents), torch.get_num_threads()
        if not (needed <= self._drafter.context_limit and min(ids) >= 0 and max(ids) < self._drafter.vocab_size):
            raise ContractError(f"{needed} ids or an id of {list(ids)}: more than this drafter's tables hold")
        if needed > self._capacity or threads > self._threads:
            self._make_room(needed, threads)
        self._drafter.forward(
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
            )
        )

    def _make_room(self, needed: int, threads: int) -> None:
        capacity = max(self._capacity, -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP)
        larger = self._drafter.slots(capacity)
        larger[..., : self._kv.shape[-1]] = self._kv
        self._kv, self._capacity, self._threads = larger, capacity, threads
        self._scratch = self._drafter.scratch(capacity, threads)


def is_supported(model: PreTrainedModel) -> bool:
    """Whether the native pass computes what the model's own does, on this device."""
    if type(model) is not LlamaForCausalLM or model.device.type != "cpu":
        return False
    config: Any = model.config
    attention: Any = model.model.layers[0].self_attn
    return (
        config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and model.lm_head.bias is None
        and not has_moving_rope(config)
        and attention.head_dim % 16 == 0
        and model.model.rotary_emb.inv_freq.shape[0] * 2 == attention.head_dim
        and attention.num_key_value_groups * config.num_key_value_heads == config.num_attention_heads
    )


def _ints(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int]":
    return (ctypes.c_int * len(values))(*values)
