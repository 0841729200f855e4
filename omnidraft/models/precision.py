"""How a transformers model computes: which number format its matrices have.

`packed16` is FBGEMM's float16-weight kernel: half the memory traffic of float32 and, unlike bfloat16 on processors
without instructions for it, nearly as fast over six rows as over one. `int8` quantises activations per pass too;
only a drafter may use it. torch keeps both kernels behind `torch.ops.quantized`. A target is quantised by `quantise`,
whose rows do not know of each other.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from omnidraft.models import store

_INT8_WEIGHT_MAX = 63
"""AVX2 adds two products of 8 bits in 16: one factor must keep to 7. Weights bear it far better than activations
(SmolLM2: the likeliest token stays in 93 of 100 places, against 86)."""


def automatic() -> str:
    """bfloat16 where the processor or an accelerator has instructions for it, else packed16, else float32."""
    if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return "bfloat16"
    return "packed16" if "fbgemm" in torch.backends.quantized.supported_engines else "float32"


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed for one of the quantized kernels."""

    def __init__(self, linear: nn.Linear, precision: str) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self._is_int8 = precision == "int8"
        self._packed: Any = _pack_int8(weight, bias) if self._is_int8 else _pack_float16(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_int8:
            return torch.ops.quantized.linear_dynamic(x, self._packed, False)
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


class FloatEmbedding(nn.Module):
    """Looks rows up in a half-size table and returns float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().to(torch.bfloat16), requires_grad=False)
        self._scale = getattr(embedding, "embed_scale", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(ids, self.weight).float()
        return rows if self._scale is None else rows * self._scale.float()


def apply(model: nn.Module, precision: str) -> nn.Module:
    """The model, changed in place to compute in `precision`."""
    if precision in ("float32", "bfloat16"):
        return model.to(torch.float32 if precision == "float32" else torch.bfloat16)
    return _with_linears(model, lambda linear: PackedLinear(linear, precision))


def quantise(model: nn.Module, kind: Literal["int8", "int4"], folder: Path | None = None) -> nn.Module:
    """The model, changed in place to weights of 8 or 4 bits in groups; the head, which decides, keeps 8.

    Args:
        folder: where the kernels are compiled; None: `native` in the user's cache.

    Raises:
        ModelError: there is no C++ compiler.
    """
    from omnidraft.models.native import library, linear

    kernels = library.load(folder or store.default_home() / "native")
    head = model.get_output_embeddings()  # type: ignore[operator]
    return _with_linears(model, lambda each: linear.GroupedLinear(each, "int8" if each is head else kind, kernels))


def _with_linears(model: nn.Module, replaced: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Linear layers as told, embeddings of half the size, all else in float32."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, replaced(child))
            elif isinstance(child, nn.Embedding):
                setattr(parent, name, FloatEmbedding(child))
    for name, parameter in model.named_parameters():
        if "embed" not in name:
            parameter.data = parameter.data.float()
    return model


def _pack_float16(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


def _pack_int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    scale_N = weight.abs().amax(dim=1).clamp_min(1e-8) / _INT8_WEIGHT_MAX
    zero_N = torch.zeros(weight.shape[0], dtype=torch.long)
    return torch.ops.quantized.linear_prepack(
        torch.quantize_per_channel(weight, scale_N, zero_N, axis=0, dtype=torch.qint8), bias
    )
