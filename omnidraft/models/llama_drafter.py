"""A drafter of the Llama family, written plainly: fused projections, one block of keys and values, TorchScript.

A third of a 135M model's step is Python: as TorchScript it takes 20 ms instead of 30 (2 cores). TorchScript is
deprecated, but its successors need a C++ compiler on the serving machine; where it is gone, the same modules run as
they are. The drafter may compute in any precision, since it cannot change the text.
Shapes: S new positions, C slots, L layers, Q query heads, K key heads, D head size, H hidden size, V vocabulary.
"""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from omnidraft.models import precision as precisions

logger = logging.getLogger(__name__)

_CAPACITY_STEP = 512


class LlamaDrafter:
    """Implements ports.DraftModel at one set of weights."""

    def __init__(self, model: LlamaForCausalLM, precision: str) -> None:
        config = model.config
        self.vocab_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        body = _Body(model, precision)
        self.dtype: torch.dtype = body.dtype
        self._kv_shape_LKD: tuple[int, int, int] = body.kv_shape_LKD
        self._forward = _scripted(body)
        self._warm_up()

    def open(self) -> "_Session":
        """See ports.DraftModel."""
        return _Session(self)

    @torch.inference_mode()
    def forward(self, kv_L2KCD: torch.Tensor, ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits float32 [V] after the last id; keys and values of `ids` go to the slots from `start` on."""
        logits_V: torch.Tensor = self._forward(torch.tensor(ids), kv_L2KCD, start)
        return logits_V

    def slots(self, capacity: int) -> torch.Tensor:
        """Empty keys and values. [L, 2, K, C, D]"""
        layers, keys, size = self._kv_shape_LKD
        return torch.zeros(layers, 2, keys, capacity, size, dtype=self.dtype)

    def _warm_up(self) -> None:
        """TorchScript optimises during the first two calls, 0.2 s each: here, not in the first request."""
        for ids in ([0, 0], [0]) * 2:
            self.forward(self.slots(len(ids)), ids, 0)


class _Session:
    """Implements ports.DraftSession."""

    def __init__(self, drafter: LlamaDrafter) -> None:
        self._drafter = drafter
        self._kv_L2KCD = drafter.slots(_CAPACITY_STEP)

    def advance(self, keep: int, ids: Sequence[int]) -> torch.Tensor:
        needed = keep + len(ids)
        if needed > self._kv_L2KCD.shape[3]:
            larger = self._drafter.slots(-(-needed // _CAPACITY_STEP) * _CAPACITY_STEP)
            larger[:, :, :, :keep] = self._kv_L2KCD[:, :, :, :keep]
            self._kv_L2KCD = larger
        return self._drafter.forward(self._kv_L2KCD, ids, keep)


def is_supported(model: PreTrainedModel) -> bool:
    """Whether this forward computes what the model's own does, on this device."""
    return isinstance(model, LlamaForCausalLM) and model.device.type == "cpu" and model.config.hidden_act == "silu"


class _Norm(nn.Module):
    def __init__(self, norm: Any, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight_H = norm.weight.detach().to(dtype)
        self.eps = eps

    def forward(self, x_SH: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x_SH, self.weight_H.shape, self.weight_H, self.eps)


class _Layer(nn.Module):
    def __init__(self, layer: Any, config: Any, precision: str, dtype: torch.dtype) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.num_queries: int = config.num_attention_heads
        self.num_keys: int = config.num_key_value_heads or config.num_attention_heads
        self.head_size: int = attention.head_dim
        self.norm = _Norm(layer.input_layernorm, config.rms_norm_eps, dtype)
        self.qkv = precisions.linear([attention.q_proj, attention.k_proj, attention.v_proj], precision)
        self.out = precisions.linear([attention.o_proj], precision)
        self.mlp_norm = _Norm(layer.post_attention_layernorm, config.rms_norm_eps, dtype)
        self.gate_up = precisions.linear([mlp.gate_proj, mlp.up_proj], precision)
        self.down = precisions.linear([mlp.down_proj], precision)

    def forward(
        self,
        x_SH: torch.Tensor,
        kv_2KCD: torch.Tensor,
        cos_S1D: torch.Tensor,
        sin_S1D: torch.Tensor,
        sees_SC: torch.Tensor | None,
        start: int,
    ) -> torch.Tensor:
        x_SH = x_SH + self._attend(self.norm(x_SH), kv_2KCD, cos_S1D, sin_S1D, sees_SC, start)
        gate_S, up_S = self.gate_up(self.mlp_norm(x_SH)).chunk(2, dim=-1)
        mlp_SH: torch.Tensor = self.down(functional.silu(gate_S) * up_S)
        return x_SH + mlp_SH

    def _attend(
        self,
        x_SH: torch.Tensor,
        kv_2KCD: torch.Tensor,
        cos_S1D: torch.Tensor,
        sin_S1D: torch.Tensor,
        sees_SC: torch.Tensor | None,
        start: int,
    ) -> torch.Tensor:
        size, queries, keys = x_SH.shape[0], self.num_queries, self.num_keys
        heads = self.qkv(x_SH).view(size, queries + 2 * keys, self.head_size)
        turned = heads[:, : queries + keys]
        turned = torch.addcmul(turned * cos_S1D, turned.roll([self.head_size // 2], [-1]), sin_S1D)
        kv_2KCD[0, :, start : start + size] = turned[:, queries:].transpose(0, 1)
        kv_2KCD[1, :, start : start + size] = heads[:, queries + keys :].transpose(0, 1)
        seen = kv_2KCD[:, :, : start + size]
        mixed = functional.scaled_dot_product_attention(
            turned[:, :queries].transpose(0, 1)[None], seen[:1], seen[1:], attn_mask=sees_SC, enable_gqa=True
        )
        out_SH: torch.Tensor = self.out(mixed[0].transpose(0, 1).reshape(size, queries * self.head_size))
        return out_SH


class _Body(nn.Module):
    def __init__(self, model: LlamaForCausalLM, precision: str) -> None:
        super().__init__()
        config = model.config
        self.dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.embedding_VH = model.model.embed_tokens.weight.detach().to(torch.bfloat16)
        layers = [_Layer(each, config, precision, self.dtype) for each in model.model.layers]
        self.kv_shape_LKD = (len(layers), layers[0].num_keys, layers[0].head_size)
        self.layers = nn.ModuleList(layers)
        self.norm = _Norm(model.model.norm, config.rms_norm_eps, self.dtype)
        self.head = precisions.linear([model.lm_head], precision)
        self.cos_CD, self.sin_CD = _rope(model, self.dtype)

    def forward(self, ids_S: torch.Tensor, kv_L2KCD: torch.Tensor, start: int) -> torch.Tensor:
        size = ids_S.shape[0]
        end = start + size
        x_SH = self.embedding_VH[ids_S].to(self.dtype)
        cos_S1D, sin_S1D = self.cos_CD[start:end].unsqueeze(1), self.sin_CD[start:end].unsqueeze(1)
        sees_SC: torch.Tensor | None = None
        if size > 1:
            sees_SC = torch.arange(end) <= torch.arange(start, end).unsqueeze(1)
        for number, layer in enumerate(self.layers):
            x_SH = layer(x_SH, kv_L2KCD[number], cos_S1D, sin_S1D, sees_SC, start)
        logits_1V: torch.Tensor = self.head(self.norm(x_SH[-1:]))
        return logits_1V[0].float()


def _scripted(body: _Body) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.freeze(torch.jit.script(body.eval()))
    except (AttributeError, RuntimeError) as exc:
        logger.warning("this torch has no TorchScript, each drafter step takes half as long again: %s", exc)
        return body


def _rope(model: LlamaForCausalLM, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, and sin with the sign of rotate_half put in, so that turning is a roll and an addcmul. [C, D]"""
    rotary: Any = model.model.rotary_emb
    cos_1CD, sin_1CD = rotary(torch.zeros(1), torch.arange(model.config.max_position_embeddings)[None])
    size = cos_1CD.shape[-1]
    sign_D = torch.ones(size)
    sign_D[: size // 2] = -1
    return cos_1CD[0].to(dtype), (sin_1CD[0] * sign_D).to(dtype)
