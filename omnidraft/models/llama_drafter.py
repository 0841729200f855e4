"""A drafter of the Llama family, written plainly: fused projections, one block of keys and values.

A step of a 135M model spends as much time in Python as in its weights; this forward makes a third of the calls. The
drafter may compute in any precision, since it cannot change the text.
Shapes: S new positions, C slots, L layers, Q query heads, K key heads, D head size, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from omnidraft.models import precision as precisions

_CAPACITY_STEP = 512


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_H: torch.Tensor
    qkv: torch.nn.Module
    out: torch.nn.Module
    mlp_norm_H: torch.Tensor
    gate_up: torch.nn.Module
    down: torch.nn.Module


class LlamaDrafter:
    """Implements ports.DraftModel at one set of weights."""

    def __init__(self, model: LlamaForCausalLM, precision: str) -> None:
        config = model.config
        self.vocab_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        self.num_queries: int = config.num_attention_heads
        self.num_keys: int = config.num_key_value_heads or config.num_attention_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps: float = config.rms_norm_eps
        self.dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._embedding_VH = model.model.embed_tokens.weight.detach().to(torch.bfloat16)
        self._layers = [_layer(each, precision, self.dtype) for each in model.model.layers]
        self._norm_H = model.model.norm.weight.detach().to(self.dtype)
        self._head = precisions.linear([model.lm_head], precision)
        self._cos_CD, self._sin_CD = _rope(model, self.context_limit, self.head_size, self.dtype)

    def open(self) -> "_Session":
        """See ports.DraftModel."""
        return _Session(self)

    @torch.inference_mode()
    def forward(self, kv_L2KCD: torch.Tensor, ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits float32 [V] after the last id; keys and values of `ids` go to the slots from `start` on."""
        end = start + len(ids)
        x_SH = self._embedding_VH[torch.tensor(ids)].to(self.dtype)
        cos_S1D, sin_S1D = self._cos_CD[start:end, None], self._sin_CD[start:end, None]
        sees_SC = None
        if len(ids) > 1:
            sees_SC = torch.arange(end) <= torch.arange(start, end)[:, None]
        for layer, kv_2KCD in zip(self._layers, kv_L2KCD, strict=True):
            x_SH = x_SH + self._attend(layer, kv_2KCD, x_SH, cos_S1D, sin_S1D, sees_SC, start)
            gate_S, up_S = layer.gate_up(self._normed(x_SH, layer.mlp_norm_H)).chunk(2, dim=-1)
            x_SH = x_SH + layer.down(functional.silu(gate_S) * up_S)
        logits: torch.Tensor = self._head(self._normed(x_SH[-1:], self._norm_H))
        return logits[0].float()

    def _attend(
        self,
        layer: _Layer,
        kv_2KCD: torch.Tensor,
        x_SH: torch.Tensor,
        cos_S1D: torch.Tensor,
        sin_S1D: torch.Tensor,
        sees_SC: torch.Tensor | None,
        start: int,
    ) -> torch.Tensor:
        size, queries, keys = len(x_SH), self.num_queries, self.num_keys
        heads = layer.qkv(self._normed(x_SH, layer.norm_H)).view(size, queries + 2 * keys, self.head_size)
        turned = heads[:, : queries + keys]
        turned = torch.addcmul(turned * cos_S1D, turned.roll(self.head_size // 2, dims=-1), sin_S1D)
        kv_2KCD[0, :, start : start + size] = turned[:, queries:].transpose(0, 1)
        kv_2KCD[1, :, start : start + size] = heads[:, queries + keys :].transpose(0, 1)
        seen = kv_2KCD[:, :, : start + size]
        mixed = functional.scaled_dot_product_attention(
            turned[:, :queries].transpose(0, 1)[None], seen[:1], seen[1:], attn_mask=sees_SC, enable_gqa=True
        )
        out: torch.Tensor = layer.out(mixed[0].transpose(0, 1).reshape(size, queries * self.head_size))
        return out

    def _normed(self, x_SH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        return x_SH * torch.rsqrt(x_SH.square().mean(dim=-1, keepdim=True) + self._eps) * weight_H


class _Session:
    """Implements ports.DraftSession."""

    def __init__(self, drafter: LlamaDrafter) -> None:
        self._drafter = drafter
        self._kv_L2KCD = self._zeros(_CAPACITY_STEP)

    def advance(self, keep: int, ids: Sequence[int]) -> torch.Tensor:
        needed = keep + len(ids)
        if needed > self._kv_L2KCD.shape[3]:
            larger = self._zeros(-(-needed // _CAPACITY_STEP) * _CAPACITY_STEP)
            larger[:, :, :, :keep] = self._kv_L2KCD[:, :, :, :keep]
            self._kv_L2KCD = larger
        return self._drafter.forward(self._kv_L2KCD, ids, keep)

    def _zeros(self, capacity: int) -> torch.Tensor:
        made = self._drafter
        return torch.zeros(made.num_layers, 2, made.num_keys, capacity, made.head_size, dtype=made.dtype)


def is_supported(model: PreTrainedModel) -> bool:
    """Whether this forward computes what the model's own does, on this device."""
    return isinstance(model, LlamaForCausalLM) and model.device.type == "cpu" and model.config.hidden_act == "silu"


def _layer(layer: Any, precision: str, dtype: torch.dtype) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm_H=layer.input_layernorm.weight.detach().to(dtype),
        qkv=precisions.linear([attention.q_proj, attention.k_proj, attention.v_proj], precision),
        out=precisions.linear([attention.o_proj], precision),
        mlp_norm_H=layer.post_attention_layernorm.weight.detach().to(dtype),
        gate_up=precisions.linear([mlp.gate_proj, mlp.up_proj], precision),
        down=precisions.linear([mlp.down_proj], precision),
    )


def _rope(
    model: LlamaForCausalLM, capacity: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, and sin with the sign of rotate_half put in, so that turning is a roll and an addcmul. [C, D]"""
    positions = torch.arange(capacity)[None]
    rotary: Any = model.model.rotary_emb
    cos_1CD, sin_1CD = rotary(torch.zeros(1), positions)
    sign_D = torch.ones(head_size)
    sign_D[: head_size // 2] = -1
    return cos_1CD[0].to(dtype), (sin_1CD[0] * sign_D).to(dtype)
