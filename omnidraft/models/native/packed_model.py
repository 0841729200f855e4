"""Packed weights as the kernels read them, wherever they lie: in memory or in a mapped file.

This module does not know transformers, whose import takes seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The description of a decoder: its numbers, and what a pass does; see kernels/interface.h."""

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
    rotated: int
    activation: str
    is_gated: bool
    norms_have_mean: bool
    norms_whole: bool
    norms_rotated: bool
    is_parallel: bool
    num_experts: int
    experts_per_row: int
    shares_are_whole: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    score_cap: float
    logit_cap: float
    windows: Sequence[int]
    """The number of positions that each layer sees; 0 is all."""
    rotations: Sequence[str | None]
    """The name of each layer's table of rotations; None has none."""
    layers_name: str
    """The name of the module that has the layers."""
    sources: Mapping[str, Sequence[Source]]
    """What each matrix of a layer is packed from, in the order of its blocks."""

    def rows(self, source: Source) -> torch.Tensor:
        """Return the rows of a source in the order of the kernels."""
        rows = torch.cat([torch.arange(first, last) for first, last in source.spans])
        if not source.is_paired:
            return rows
        heads = rows.view(-1, self.head_size)
        turned, rest = heads[:, : self.rotated], heads[:, self.rotated :]
        return torch.cat([turned[:, 0::2], turned[:, 1::2], rest], dim=1).flatten()

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "ModelSizes":
        """Return the sizes whose `asdict` went through JSON."""
        sources = {name: [Source(*each) for each in found] for name, found in values["sources"].items()}
        return cls(**{**values, "sources": sources})


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
            *(self._layer(number, addresses) for number in range(sizes.num_layers))
        )
        numbers = {name: value for name, value in asdict(sizes).items() if name in native.MODEL_NUMBERS}
        self.struct = native.ModelStruct(
            **numbers | {"activation": native.ACTIVATIONS.index(sizes.activation)},
            kind=native.KINDS[native.PACKED.get(precision, precision)],
            layer=self._layers,
            **{name: addresses.get(name) for name in native.MODEL_PARTS},
        )

    def _layer(self, number: int, addresses: Mapping[str, int]) -> native.LayerStruct:
        sizes = self.sizes
        rotation = sizes.rotations[number]
        tables = {} if rotation is None else {name: addresses[f"{name}.{rotation}"] for name in ("cos", "sin")}
        parts = {name: addresses.get(layer_part(number, name)) for name in native.LAYER_PARTS}
        return native.LayerStruct(**parts | tables, window=sizes.windows[number])
