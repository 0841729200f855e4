"""How a transformers model computes: which number format its matrices have.

`packed16`, `int8` and `int4` are our own kernels (native/linear.py), whose rows do not know of each other: bfloat16
weights in float32 arithmetic, and weights rounded to levels. On processors that multiply no matrices of bfloat16,
`packed16` reads half of what float32 reads, and several rows cost little more than one.
"""

import logging
from pathlib import Path

import torch
from torch import nn

from omnidraft.errors import ModelError
from omnidraft.models.native import library
from omnidraft.models.native.linear import PackedLinear

logger = logging.getLogger(__name__)


def automatic() -> str:
    """bfloat16 where an accelerator or the processor multiplies matrices of it, else packed16, else float32.

    Instructions for vectors of bfloat16 (AVX512) are not enough: with them torch's pass over one row takes two to three
    times as long as ours, and one over 16 rows longer too.
    """
    if torch.cuda.is_available() or torch.cpu._is_amx_tile_supported():
        return "bfloat16"
    try:
        library.load()
    except ModelError as exc:
        logger.warning("computing in float32, which is slower: %s", exc)
        return "float32"
    return "packed16"


class FloatEmbedding(nn.Module):
    """Looks rows up in a half-size table and returns float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().to(torch.bfloat16), requires_grad=False)
        self._scale = getattr(embedding, "embed_scale", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(ids, self.weight).float()
        return rows if self._scale is None else rows * self._scale.float()


def apply(model: nn.Module, precision: str, folder: Path | None = None) -> nn.Module:
    """The model, changed in place to compute in `precision`, on an accelerator if there is one and it can.

    The head, which decides, keeps 8 bits in int4.

    Args:
        folder: where our kernels are compiled; None: `native` in the user's cache.

    Raises:
        ModelError: our kernels are asked for, and there is no C++ compiler.
    """
    if precision not in library.PACKED:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return model.to(device, torch.float32 if precision == "float32" else torch.bfloat16)
    kernels = library.load(folder)
    kind = library.PACKED[precision]
    head = model.get_output_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                own = library.HEADS.get(kind, kind) if child is head else kind
                setattr(parent, name, PackedLinear(child, own, kernels))
            elif isinstance(child, nn.Embedding):
                setattr(parent, name, FloatEmbedding(child))
    for name, parameter in model.named_parameters():
        if "embed" not in name:
            parameter.data = parameter.data.float()
    return model
