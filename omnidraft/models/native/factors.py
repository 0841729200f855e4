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
from omnidraft.models.native.packed_model import LayerSizes, ModelSizes, Source
from omnidraft.snapshots.low_rank import SCALE, A, B, factored_modules


class PackedFactors:
    """Factors in bfloat16, their scale inside B; those of modules that are not named are zero."""

    def __init__(self, sizes: ModelSizes, tensors: Mapping[str, Tensor]) -> None:
        """Raises SnapshotCorrupt when the tensors do not fit a model of these sizes."""
        self._sizes = sizes
        shapes = _shapes(sizes)
        modules = factored_modules(shapes, tensors)
        rank = max(len(tensors[module + A]) for module in modules)
        self.rank = -(-rank // native.RANKS_TOGETHER) * native.RANKS_TOGETHER
        layers = [self._layer(layer, shapes, tensors) for layer in range(len(sizes.layers))]
        parts = [part for layer in layers for pair in layer for part in pair]
        self._memory = torch.cat([part.flatten() for part in parts])  # in one piece, which leaves no gaps behind
        addresses = accumulate((part.nbytes for part in parts), initial=self._memory.data_ptr())
        self._layers = (native.LayerFactorsStruct * len(layers))(*(_struct(addresses) for _ in layers))
        self.struct = native.FactorsStruct(self.rank, self._layers)

    @property
    def num_bytes(self) -> int:
        """The memory that they take."""
        return self._memory.nbytes

    def _layer(
        self, layer: int, shapes: Mapping[str, tuple[int, int]], tensors: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return A and B of each matrix of a layer."""
        packed, sizes = [], self._sizes.layers[layer]
        for matrix in native.MATRICES:
            a, b = [], []
            for source in sizes.sources.get(matrix, ()):
                name = _module(self._sizes, layer, source)
                a.append(self._a(tensors.get(name + A), shapes[name][1]))
                b.append(self._b(tensors.get(name + B), sizes.rows(source)))
            if not a:  # experts have no factors, and most layers no inputs of their own
                packed.append((torch.zeros(0, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.bfloat16)))
                continue
            blocks = torch.stack(b, dim=1).flatten(0, 1) if matrix == native.TURNS else torch.cat(b)
            packed.append((torch.cat(a), blocks))
        return packed

    def _a(self, a_RK: Tensor | None, inputs: int) -> Tensor:
        if a_RK is None:
            a_RK = torch.zeros(0, inputs, dtype=torch.bfloat16)
        return pad(a_RK.to(torch.bfloat16), (0, -inputs % native.GROUP, 0, self.rank - len(a_RK)))

    def _b(self, b_NR: Tensor | None, rows: Tensor) -> Tensor:
        """Return blocks [N / 16, R, 16] of these rows."""
        if b_NR is None:
            scaled_NR = torch.zeros(len(rows), 0, dtype=torch.bfloat16)
        else:
            scaled_NR = (b_NR[rows].float() * SCALE).to(torch.bfloat16)
        padded_NR = pad(scaled_NR, (0, self.rank - scaled_NR.shape[1], 0, -len(rows) % native.BLOCK))
        return padded_NR.unflatten(0, (-1, native.BLOCK)).transpose(1, 2)


def _module(sizes: ModelSizes, layer: int, source: Source) -> str:
    return f"{sizes.layers_name}.{layer}.{source.module}"


def _shapes(sizes: ModelSizes) -> dict[str, tuple[int, int]]:
    """Return the shapes [N, K] of all modules that may have factors."""
    shapes: dict[str, tuple[int, int]] = {}
    for number, layer in enumerate(sizes.layers):
        inputs = _inputs(sizes, layer)
        for matrix, sources in layer.sources.items():
            for source in sources:
                name, last = _module(sizes, number, source), max(last for _, last in source.spans)
                shapes[name] = (max(shapes.get(name, (0,))[0], last), inputs[matrix])
    return shapes


def _inputs(sizes: ModelSizes, layer: LayerSizes) -> dict[str, int]:
    """Return the number of inputs of each matrix of a layer."""
    attended = sizes.num_query_heads * layer.head_size
    widths = (sizes.hidden, attended, sizes.hidden, layer.mlp, sizes.hidden, sizes.layer_inputs)
    return dict(zip(native.MATRICES, widths, strict=True))


def _struct(addresses: Iterator[int]) -> native.LayerFactorsStruct:
    """Return the struct of the layer whose parts, A and B of each matrix, are at the next addresses."""
    pairs = [(next(addresses), next(addresses)) for _ in native.MATRICES]
    pointers = ctypes.c_void_p * len(native.MATRICES)
    return native.LayerFactorsStruct(*(pointers(*column) for column in zip(*pairs, strict=True)))
