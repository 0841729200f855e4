"""Packed weights as the kernels read them, wherever they lie: in memory or in a mapped file.

This module does not know transformers, whose import takes seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from omnidraft.models.native import library as native

LAYER_PARTS = ("norm", "mlp_norm", "bias", "qkv", "out", "gate_up", "down")
MODEL_PARTS = ("norm", "head", "embedding", "cos", "sin")

_ALIGNMENT = 64
"""Parts begin at multiples of this."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the packed weights."""

    name: str
    num_bytes: int
    write: Callable[[int], None]
    """Packs the part to an address, where all bytes are zero."""

    @property
    def padded_bytes(self) -> int:
        """The size up to the next part."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The numbers of a model that its passes need."""

    num_layers: int
    hidden: int
    num_query_heads: int
    num_key_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    context_limit: int
    eps: float
    scaling: float
    has_bias: bool
    """Whether queries, keys and values have biases."""


def layer_part(layer: int, name: str) -> str:
    """Return the name of a layer's part."""
    return f"layers.{layer}.{name}"


class PackedModel:
    """The packed weights of a model, in memory that lives as long as this does."""

    def __init__(self, sizes: ModelSizes, precision: str, addresses: Mapping[str, int], memory: object) -> None:
        """
        Args:
            addresses: the address of each part, by its name.
            memory: the owner of that memory.
        """
        self.sizes = sizes
        self.kv_dtype = torch.float16 if precision in ("int8", "int4") else torch.float32
        self._memory = memory
        self._layers = (native.LayerStruct * sizes.num_layers)(
            *(
                native.LayerStruct(**{name: addresses.get(layer_part(layer, name)) for name in LAYER_PARTS})
                for layer in range(sizes.num_layers)
            )
        )
        self.struct = native.ModelStruct(
            kind=native.KINDS[native.PACKED.get(precision, precision)],
            num_layers=sizes.num_layers,
            hidden=sizes.hidden,
            num_query_heads=sizes.num_query_heads,
            num_key_heads=sizes.num_key_heads,
            head_size=sizes.head_size,
            mlp=sizes.mlp,
            vocabulary=sizes.vocabulary,
            eps=sizes.eps,
            scaling=sizes.scaling,
            layer=self._layers,
            **{name: addresses[name] for name in MODEL_PARTS},
        )
