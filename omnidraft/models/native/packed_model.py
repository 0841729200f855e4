"""Packed weights as the kernels read them, wherever they lie: in memory or in a mapped file.

This module does not know transformers, whose import takes seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from omnidraft.models.native import library as native

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


class Source(NamedTuple):
    """The rows of one of a layer's linear modules that a matrix of the kernels is packed from."""

    module: str
    spans: Sequence[Sequence[int]]
    """First and last of each run of rows."""
    is_paired: bool = False
    """Whether neighbours are rotated, which the kernels want half a head apart."""

    @property
    def num_rows(self) -> int:
        """The number of rows of all spans."""
        return sum(last - first for first, last in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The numbers of one layer."""

    num_key_heads: int
    head_size: int
    mlp: int
    """The width of the MLP, or of that beside experts; 0 has none."""
    expert_mlp: int
    rotated: int
    window: int
    """The number of positions that a row sees; 0 is all."""
    rotation: str | None
    """The name of the layer's table of rotations; None has none."""
    keys_of: int | None
    """The layer whose keys it sees; None stores its own."""
    scale: float
    """Of what leaves the layer."""
    sources: Mapping[str, Sequence[Source]]
    """What each matrix is packed from, in the order of its blocks."""

    @property
    def values_per_slot(self) -> int:
        """The number of values that the keys and values of one id take."""
        return 2 * self.num_key_heads * self.head_size if self.keys_of is None else 0

    def rows(self, source: Source) -> torch.Tensor:
        """Return the rows of a source in the order of the kernels."""
        rows = torch.cat([torch.arange(first, last) for first, last in source.spans])
        if not source.is_paired:
            return rows
        heads = rows.view(-1, self.head_size)
        turned, rest = heads[:, : self.rotated], heads[:, self.rotated :]
        return torch.cat([turned[:, 0::2], turned[:, 1::2], rest], dim=1).flatten()

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "LayerSizes":
        """Return the sizes whose `asdict` went through JSON."""
        sources = {name: [Source(*each) for each in found] for name, found in values["sources"].items()}
        return cls(**{**values, "sources": sources})


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The description of a decoder: its numbers, and what a pass does; see kernels/interface.h."""

    hidden: int
    num_query_heads: int
    vocabulary: int
    first_context: int
    context_limit: int
    layer_inputs: int
    eps: float
    scaling: float
    activation: str
    is_gated: bool
    norms_have_mean: bool
    norms_whole: bool
    norms_rotated: bool
    is_parallel: bool
    num_experts: int
    experts_per_row: int
    shares_are_whole: bool
    scores_are_sigmoid: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    score_cap: float
    logit_cap: float
    layers_name: str
    """The name of the module that has the layers."""
    layers: Sequence[LayerSizes]

    @property
    def values_per_slot(self) -> int:
        """The number of values that the keys and values of one id take in all layers."""
        return sum(layer.values_per_slot for layer in self.layers)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "ModelSizes":
        """Return the sizes whose `asdict` went through JSON."""
        return cls(**{**values, "layers": [LayerSizes.read(each) for each in values["layers"]]})


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
        self._first_values = list(accumulate((each.values_per_slot for each in sizes.layers), initial=0))
        self._layers = (native.LayerStruct * len(sizes.layers))(
            *(self._layer(number, addresses) for number in range(len(sizes.layers)))
        )
        numbers = {name: value for name, value in asdict(sizes).items() if name in native.MODEL_NUMBERS}
        self.struct = native.ModelStruct(
            **numbers | {"activation": native.ACTIVATIONS.index(sizes.activation)},
            kind=native.KINDS[native.PACKED.get(precision, precision)],
            num_layers=len(sizes.layers),
            layer=self._layers,
            **{name: addresses.get(name) for name in native.MODEL_PARTS},
        )

    def _layer(self, number: int, addresses: Mapping[str, int]) -> native.LayerStruct:
        layer = self.sizes.layers[number]
        tables = {name: addresses.get(f"{name}.{layer.rotation}") for name in ("cos", "sin")}
        parts = {name: addresses.get(layer_part(number, name)) for name in native.LAYER_PARTS}
        return native.LayerStruct(
            **parts | tables | {name: getattr(layer, name) for name in native.LAYER_NUMBERS},
            stores_keys=layer.keys_of is None,
            first_value=self._first_values[number if layer.keys_of is None else layer.keys_of],
            scale=layer.scale,
        )
