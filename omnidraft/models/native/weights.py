"""The weights of a transformers model of the Llama family as parts, each packed where the caller wants it.

Shapes: N output channels, K input channels, H hidden size, C positions, D head size.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from omnidraft.models.hf.attention import has_length_dependent_rope
from omnidraft.models.native import library as native
from omnidraft.models.native.matrix import address_of, memory, pack
from omnidraft.models.native.packed_model import ModelSizes, PackedModel, Part, layer_part


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


def packed_in_memory(model: PreTrainedModel, precision: str, library: ctypes.CDLL) -> PackedModel:
    """Pack a model that is_supported into one block of memory."""
    parts = ModelParts(model, precision, library).parts
    *starts, size = accumulate((part.padded_bytes for part in parts), initial=0)
    block = memory(size)
    addresses = {part.name: address_of(block) + start for part, start in zip(parts, starts, strict=True)}
    for part in parts:
        part.write(addresses[part.name])
    return PackedModel(model_sizes(model), precision, addresses, block)


def model_sizes(model: Any) -> ModelSizes:
    """Return the numbers of a model that is_supported."""
    config, attention = model.config, model.model.layers[0].self_attn
    return ModelSizes(
        num_layers=len(model.model.layers),
        hidden=config.hidden_size,
        num_query_heads=config.num_attention_heads,
        num_key_heads=config.num_key_value_heads,
        head_size=attention.head_dim,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        context_limit=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        scaling=attention.scaling,
        has_bias=attention.q_proj.bias is not None,
    )


class ModelParts:
    """The parts of a model that is_supported; nothing is packed before a part is written."""

    def __init__(self, model: Any, precision: str, library: ctypes.CDLL) -> None:
        self._library = library
        kind = native.PACKED.get(precision, precision)
        self._kind, self._head_kind = native.KINDS[kind], native.KINDS[native.HEADS.get(kind, kind)]
        self._head = model.lm_head
        self._embedding_dtype = torch.float32 if precision == "float32" else torch.bfloat16
        self.parts: Sequence[Part] = [
            *(part for number, layer in enumerate(model.model.layers) for part in self._layer(number, layer)),
            *self._model(model),
        ]

    def _layer(self, number: int, layer: Any) -> Iterator[Part]:
        name, attention, mlp = partial(layer_part, number), layer.self_attn, layer.mlp
        yield _tensor(name("norm"), _norm(layer.input_layernorm))
        yield _tensor(name("mlp_norm"), _norm(layer.post_attention_layernorm))
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        if attention.q_proj.bias is not None:
            yield _tensor(name("bias"), torch.cat([each.bias for each in projections]).detach().float())
        yield self._in_sequence(name("qkv"), *projections)
        yield self._in_sequence(name("out"), attention.o_proj)
        yield self._in_turns(name("gate_up"), mlp.gate_proj, mlp.up_proj)
        yield self._in_sequence(name("down"), mlp.down_proj)

    def _model(self, model: Any) -> Iterator[Part]:
        cos_CD, sin_CD = _rope(model)
        yield _tensor("norm", _norm(model.model.norm))
        yield self._in_sequence("head", model.lm_head)
        yield _tensor("embedding", model.model.embed_tokens.weight.detach().to(self._embedding_dtype))
        yield _tensor("cos", cos_CD)
        yield _tensor("sin", sin_CD)

    def _in_sequence(self, name: str, *matrices: nn.Linear) -> Part:
        """Return a part with these matrices one after the other."""
        sizes = [self._packed_bytes(matrix) for matrix in matrices]

        def write(address: int) -> None:
            for matrix, start in zip(matrices, accumulate(sizes, initial=0), strict=False):
                self._pack(matrix, address + start, 1, 0)

        return Part(name, sum(sizes), write)

    def _in_turns(self, name: str, *matrices: nn.Linear) -> Part:
        """Return a part with these matrices, their blocks interleaved."""

        def write(address: int) -> None:
            for number, matrix in enumerate(matrices):
                self._pack(matrix, address, len(matrices), number)

        return Part(name, sum(map(self._packed_bytes, matrices)), write)

    def _pack(self, matrix: nn.Linear, address: int, stride: int, offset: int) -> None:
        pack(self._library, self._kind_of(matrix), matrix.weight, address, stride, offset)

    def _packed_bytes(self, matrix: nn.Linear) -> int:
        size: int = self._library.omnidraft_packed_bytes(self._kind_of(matrix), *matrix.weight.shape)
        return size

    def _kind_of(self, matrix: nn.Linear) -> int:
        return self._head_kind if matrix is self._head else self._kind


def _tensor(name: str, tensor: torch.Tensor) -> Part:
    """Return a part that is a tensor as it is."""
    kept = tensor.contiguous()

    def write(address: int) -> None:
        ctypes.memmove(address, kept.data_ptr(), kept.nbytes)

    return Part(name, kept.nbytes, write)


def _norm(norm: Any) -> torch.Tensor:
    weight_H = norm.weight.detach().float()
    return nn.functional.pad(weight_H, (0, -len(weight_H) % native.GROUP))


def _rope(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of every position [C, D/2], without the second half, which repeats the first."""
    rotary: Any = model.model.rotary_emb
    positions = torch.arange(model.config.max_position_embeddings)
    cos_1CD, sin_1CD = rotary(torch.zeros(1, dtype=torch.float32), positions[None])
    half = cos_1CD.shape[-1] // 2
    return cos_1CD[0, :, :half].float(), sin_1CD[0, :, :half].float()
