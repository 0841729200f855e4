"""How a transformers model computes: which number format its matrices have.

`packed16`, `int8` and `int4` are our own kernels (native/linear.py), whose rows do not know of each other: bfloat16
weights in float32 arithmetic, and weights rounded to levels. On processors that multiply no matrices of bfloat16,
`packed16` reads half of what float32 reads, and several rows cost little more than one.
"""

import logging
from collections.abc import Mapping

import torch
from torch import nn

from omnidraft.errors import KernelsUnavailable
from omnidraft.models.native import library
from omnidraft.models.native.build import VARIANTS
from omnidraft.models.native.linear import PackedLinear
from omnidraft.models.probe import choice

ORDER = ("bfloat16", "packed16", "float32")
"""Of formats that are equally fast here: further rows of bfloat16 cost least, so better drafters gain more with it."""
NOISE = 0.1
"""A smaller difference between two measured times says nothing."""

logger = logging.getLogger(__name__)


def automatic(kernels: str = "auto") -> str:
    """What `auto` means here: bfloat16 on an accelerator, else whichever of packed16 and bfloat16 gives tokens sooner.

    Both keep 16 bits of every weight. Where our kernels do not work, float32 takes packed16's place: the same
    arithmetic over twice the memory.

    Args:
        kernels: which build of our kernels may be used; see choice.kernels.

    Raises:
        ModelError: that build was asked for by name and does not work here, or nothing does.
    """
    if torch.cuda.is_available():
        return "bfloat16"
    try:
        return _fastest(choice.kernels(kernels).seconds_per_token)
    except KernelsUnavailable as exc:
        if kernels in VARIANTS:
            raise
        logger.warning("computing without our kernels, which is slower: %s", exc)
    products = choice.torch_products()
    products.require("float32")
    return _fastest(products.outcome.seconds)


def _fastest(seconds: Mapping[str, float]) -> str:
    """The first of ORDER that is not clearly slower than the fastest."""
    clearly = (1 + NOISE) * min(seconds.values())
    return next(name for name in ORDER if name in seconds and seconds[name] <= clearly)


class FloatEmbedding(nn.Module):
    """Looks rows up in a half-size table and returns float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().to(torch.bfloat16), requires_grad=False)
        self._scale = getattr(embedding, "embed_scale", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(ids, self.weight).float()
        return rows if self._scale is None else rows * self._scale.float()


def apply(model: nn.Module, precision: str, kernels: str = "auto") -> nn.Module:
    """The model, changed in place to compute in `precision`, on an accelerator if there is one and it can.

    The head, which decides, keeps 8 bits in int4.

    Args:
        kernels: which build of our kernels; see choice.kernels.

    Raises:
        ModelError: this precision cannot be computed here.
    """
    if precision not in library.PACKED:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            choice.torch_products().require(precision)
        return model.to(device, torch.float32 if precision == "float32" else torch.bfloat16)
    kernel_library = library.load(kernels)
    kind = library.PACKED[precision]
    head = model.get_output_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                own = library.HEADS.get(kind, kind) if child is head else kind
                setattr(parent, name, PackedLinear(child, own, kernel_library))
            elif isinstance(child, nn.Embedding):
                setattr(parent, name, FloatEmbedding(child))
    for name, parameter in model.named_parameters():
        if "embed" not in name:
            parameter.data = parameter.data.float()
    return model
