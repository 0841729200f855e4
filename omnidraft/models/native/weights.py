"""The weights of a transformers model of the Llama family, packed for kernels.cpp into one block of memory.

Shapes: N output channels, K input channels, H hidden size, C positions, D head size.
"""

import ctypes
import mmap
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from omnidraft import throttle
from omnidraft.models.hf.attention import has_length_dependent_rope
from omnidraft.models.native import library as native

_CHUNK_WEIGHTS = 2**18
"""Weights that are packed at once."""


def is_supported(model: PreTrainedModel) -> bool:
    """Return whether the native pass computes the same as the model's own, and there is no accelerator."""
    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM) or torch.cuda.is_available():
        return False
    config: Any = model.config
    attention: Any = model.model.layers[0].self_attn
    return (
        config.hidden_act == "silu"
        and not getattr(config, "use_sliding_window", False)
        and attention.o_proj.bias is None
        and not getattr(config, "mlp_bias", False)
        and model.lm_head.bias is None
        and not has_length_dependent_rope(config)
        and attention.head_dim % 16 == 0
        and model.model.rotary_emb.inv_freq.shape[0] * 2 == attention.head_dim
        and attention.num_key_value_groups * config.num_key_value_heads == config.num_attention_heads
    )


class PackedLlama:
    """The packed weights, which own the memory that `struct` points to."""

    def __init__(self, model: Any, precision: str, library: ctypes.CDLL) -> None:
        self._library = library
        kind = native.PACKED.get(precision, precision)
        self._kind, self._head_kind = native.KINDS[kind], native.KINDS[native.HEADS.get(kind, kind)]
        self._head = model.lm_head
        self.kv_dtype = torch.float16 if precision in ("int8", "int4") else torch.float32
        self._embedding_dtype = torch.float32 if precision == "float32" else torch.bfloat16
        self._small: list[torch.Tensor] = []
        matrices = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._memory = memory(sum(self._packed_bytes(each) for each in matrices))
        self._next = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._layers = (native.LayerStruct * len(model.model.layers))(*map(self._layer, model.model.layers))
        self.struct = self._model(model)

    def _layer(self, layer: Any) -> native.LayerStruct:
        attention, mlp = layer.self_attn, layer.mlp
        return native.LayerStruct(
            norm=self._norm(layer.input_layernorm),
            mlp_norm=self._norm(layer.post_attention_layernorm),
            bias=self._bias(attention),
            qkv=self._in_sequence(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self._in_sequence(attention.o_proj),
            gate_up=self._in_turns(mlp.gate_proj, mlp.up_proj),
            down=self._in_sequence(mlp.down_proj),
        )

    def _model(self, model: Any) -> native.ModelStruct:
        config, attention = model.config, model.model.layers[0].self_attn
        cos_CD, sin_CD = _rope(model)
        return native.ModelStruct(
            kind=self._kind,
            num_layers=len(self._layers),
            hidden=config.hidden_size,
            num_query_heads=config.num_attention_heads,
            num_key_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            mlp=config.intermediate_size,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
            scaling=attention.scaling,
            layer=self._layers,
            norm=self._norm(model.model.norm),
            head=self._in_sequence(model.lm_head),
            embedding=self._keep(model.model.embed_tokens.weight.detach().to(self._embedding_dtype)),
            cos=self._keep(cos_CD),
            sin=self._keep(sin_CD),
        )

    def _norm(self, norm: Any) -> int:
        weight_H = norm.weight.detach().float()
        return self._keep(nn.functional.pad(weight_H, (0, -len(weight_H) % native.GROUP)))

    def _bias(self, attention: Any) -> int | None:
        """Return the address of the biases of queries, keys and values, None without biases."""
        biases = [each.bias for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return None if biases[0] is None else self._keep(torch.cat(biases).detach().float())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._small.append(tensor.contiguous())
        return self._small[-1].data_ptr()

    def _in_sequence(self, *matrices: nn.Linear) -> int:
        """Pack these matrices one after the other and return their address."""
        start = self._next
        for matrix in matrices:
            self._pack(matrix, 1, 0)
            self._next += self._packed_bytes(matrix)
        return start

    def _in_turns(self, *matrices: nn.Linear) -> int:
        """Pack these matrices with their blocks interleaved and return their address."""
        start = self._next
        for number, matrix in enumerate(matrices):
            self._pack(matrix, len(matrices), number)
        self._next += sum(map(self._packed_bytes, matrices))
        return start

    def _pack(self, matrix: nn.Linear, stride: int, offset: int) -> None:
        pack(self._library, self._kind_of(matrix), matrix.weight, self._next, stride, offset)

    def _packed_bytes(self, matrix: nn.Linear) -> int:
        size: int = self._library.omnidraft_packed_bytes(self._kind_of(matrix), *matrix.weight.shape)
        return size

    def _kind_of(self, matrix: nn.Linear) -> int:
        return self._head_kind if matrix is self._head else self._kind


def pack(library: ctypes.CDLL, kind: int, weight_NK: torch.Tensor, to: int, stride: int = 1, offset: int = 0) -> None:
    """Write a matrix to the address `to`, block by block; block b becomes block number b * stride + offset."""
    channels, inputs = weight_NK.shape
    block_bytes = library.omnidraft_packed_bytes(kind, native.BLOCK, inputs)
    blocks = max(1, _CHUNK_WEIGHTS // (native.BLOCK * inputs))
    for first in range(0, channels, blocks * native.BLOCK):
        part_NK = weight_NK.detach()[first : first + blocks * native.BLOCK].float().contiguous()
        address = to + first // native.BLOCK * stride * block_bytes
        library.omnidraft_pack(kind, part_NK.data_ptr(), *part_NK.shape, address, stride, offset)
        throttle.rest()


def memory(size: int) -> mmap.mmap:
    """Allocate memory, in huge pages where the system has them, since every pass reads all weights."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _rope(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of every position [C, D/2], without the second half, which repeats the first."""
    rotary: Any = model.model.rotary_emb
    positions = torch.arange(model.config.max_position_embeddings)
    cos_1CD, sin_1CD = rotary(torch.zeros(1, dtype=torch.float32), positions[None])
    half = cos_1CD.shape[-1] // 2
    return cos_1CD[0, :, :half].float(), sin_1CD[0, :, :half].float()
