"""Low-rank factors of one tenant as the kernels read them, beside packed weights that all texts share.

Shapes: N output channels, K input channels, R rank, P matrices that are packed in one.
"""

import ctypes
from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from omnidraft.models.native import library as native
from omnidraft.models.native.packed_model import ModelSizes
from omnidraft.snapshots.low_rank import SCALE, A, B, factored_modules

_ATTENTION, _MLP = "self_attn", "mlp"
_MATRICES = (
    (f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
    (f"{_ATTENTION}.o_proj",),
    (f"{_MLP}.gate_proj", f"{_MLP}.up_proj"),
    (f"{_MLP}.down_proj",),
)
"""The modules that are packed in each matrix of a layer, in the order of the kernels' LayerMatrix."""
_TURNS = 2
"""The matrix whose modules have their blocks in turns."""


class PackedFactors:
    """Factors in bfloat16, their scale inside B; those of modules that are not named are zero."""

    def __init__(self, sizes: ModelSizes, tensors: Mapping[str, Tensor]) -> None:
        """Raises SnapshotCorrupt when the tensors do not fit a model of these sizes."""
        shapes = _shapes(sizes)
        modules = factored_modules(shapes, tensors)
        rank = max(len(tensors[module + A]) for module in modules)
        self.rank = -(-rank // native.RANKS_TOGETHER) * native.RANKS_TOGETHER
        layers = [self._layer(layer, shapes, tensors) for layer in range(sizes.num_layers)]
        parts = [part for layer in layers for pair in layer for part in pair]
        self._memory = torch.cat([part.flatten() for part in parts])  # in one piece, which leaves no gaps behind
        addresses = accumulate((part.nbytes for part in parts), initial=self._memory.data_ptr())
        self._layers = (native.LayerFactorsStruct * sizes.num_layers)(*(_struct(addresses) for _ in layers))
        self.struct = native.FactorsStruct(self.rank, self._layers)

    @property
    def num_bytes(self) -> int:
        """The memory that they take."""
        return self._memory.nbytes

    def _layer(
        self, layer: int, shapes: Mapping[str, tuple[int, int]], tensors: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return A and B of each matrix of a layer."""
        packed = []
        for number, modules in enumerate(_MATRICES):
            names = [f"model.layers.{layer}.{module}" for module in modules]
            a = [self._a(tensors.get(name + A), shapes[name][1]) for name in names]
            b = [self._b(tensors.get(name + B), shapes[name][0]) for name in names]
            blocks = torch.stack(b, dim=1).flatten(0, 1) if number == _TURNS else torch.cat(b)
            packed.append((torch.cat(a), blocks))
        return packed

    def _a(self, a_RK: Tensor | None, inputs: int) -> Tensor:
        if a_RK is None:
            a_RK = torch.zeros(0, inputs, dtype=torch.bfloat16)
        return pad(a_RK.to(torch.bfloat16), (0, -inputs % native.GROUP, 0, self.rank - len(a_RK)))

    def _b(self, b_NR: Tensor | None, channels: int) -> Tensor:
        """Return blocks [N / 16, R, 16]."""
        if b_NR is None:
            b_NR = torch.zeros(channels, 0, dtype=torch.bfloat16)
        scaled_NR = (b_NR.float() * SCALE).to(torch.bfloat16)
        padded_NR = pad(scaled_NR, (0, self.rank - scaled_NR.shape[1], 0, -channels % native.BLOCK))
        return padded_NR.unflatten(0, (-1, native.BLOCK)).transpose(1, 2)


def _shapes(sizes: ModelSizes) -> dict[str, tuple[int, int]]:
    """Return the shapes [N, K] of all modules that may have factors."""
    queries, keys = sizes.num_query_heads * sizes.head_size, sizes.num_key_heads * sizes.head_size
    shape_of = {
        "q_proj": (queries, sizes.hidden),
        "k_proj": (keys, sizes.hidden),
        "v_proj": (keys, sizes.hidden),
        "o_proj": (sizes.hidden, queries),
        "gate_proj": (sizes.mlp, sizes.hidden),
        "up_proj": (sizes.mlp, sizes.hidden),
        "down_proj": (sizes.hidden, sizes.mlp),
    }
    modules = [module for matrix in _MATRICES for module in matrix]
    return {
        f"model.layers.{layer}.{module}": shape_of[module.split(".")[1]]
        for layer in range(sizes.num_layers)
        for module in modules
    }


def _struct(addresses: Iterator[int]) -> native.LayerFactorsStruct:
    """Return the struct of the layer whose parts, A and B of each matrix, are at the next addresses."""
    pairs = [(next(addresses), next(addresses)) for _ in range(native.NUM_LAYER_MATRICES)]
    pointers = ctypes.c_void_p * native.NUM_LAYER_MATRICES
    return native.LayerFactorsStruct(*(pointers(*column) for column in zip(*pairs, strict=True)))
