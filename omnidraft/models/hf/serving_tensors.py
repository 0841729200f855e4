"""A snapshot's weights in a model that serves.

Shapes: of LoRA factors A [rank, inputs] and B [outputs, rank].
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from omnidraft import throttle
from omnidraft.errors import SnapshotCorrupt
from omnidraft.snapshots.low_rank import SCALE, A, B, factored_modules

Train = Literal["full", "lora"]


def apply_serving_tensors(model: nn.Module, tensors: Mapping[str, Tensor], *, train: Train) -> None:
    """Put a snapshot's weights into a base model, in place; LoRA factors are merged: W += (alpha / r) B A.

    Everything is checked before the first weight changes. LoRA needs the untouched base weights.

    Args:
        model: the drafter with the module names that transformers gives it, in any floating type.

    Raises:
        SnapshotCorrupt: names or shapes are not those of this model.
    """
    parameters = dict(model.named_parameters())
    if train == "full":
        _check_full(parameters, tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
                throttle.rest()
        return
    shapes = {name.removesuffix(".weight"): tuple(parameter.shape) for name, parameter in parameters.items()}
    modules = factored_modules(shapes, tensors)
    with torch.no_grad():
        for module in modules:
            weight = parameters[f"{module}.weight"]
            delta = tensors[module + B].float() @ tensors[module + A].float()
            weight.copy_(weight.float() + SCALE * delta)
            throttle.rest()


def _check_full(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    if tensors.keys() != parameters.keys():
        differing = sorted(tensors.keys() ^ parameters.keys())
        raise SnapshotCorrupt(f"snapshot and base drafter differ in {len(differing)} weights, first {differing[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            raise SnapshotCorrupt(f"{name}: have {tuple(parameters[name].shape)}, was offered {tuple(tensor.shape)}")
