"""Low-rank factors of a drafter's weights, as a snapshot has them: W + SCALE * B A for each linear layer.

Shapes: N output channels, K input channels, R rank.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnidraft.errors import SnapshotCorrupt

if TYPE_CHECKING:
    from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"
"""Endings of the names of a layer's factors [R, K] and [N, R]."""
SCALE = 2.0
"""alpha / r; alpha is twice the rank at every rank."""


def factored_modules(shapes: Mapping[str, tuple[int, ...]], tensors: "Mapping[str, Tensor]") -> list[str]:
    """Return the modules that these factors change. Their own shapes give the rank.

    Args:
        shapes: the shapes [N, K] of the modules' weights, by the modules' names.

    Raises:
        SnapshotCorrupt: names or shapes are not those of this model.
    """
    modules = sorted({name.removesuffix(A).removesuffix(B) for name in tensors})
    for module in modules:
        shape, a, b = shapes.get(module), tensors.get(module + A), tensors.get(module + B)
        if shape is None or a is None or b is None:
            raise SnapshotCorrupt(f"{module}: base weight, lora_A and lora_B must all be there")
        if a.ndim != 2 or tuple(b.shape) != (shape[0], a.shape[0]) or a.shape[1] != shape[1]:
            raise SnapshotCorrupt(f"{module}: {tuple(b.shape)} x {tuple(a.shape)} does not fit {tuple(shape)}")
    return modules
