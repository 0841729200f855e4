"""Low-rank factors of single texts in a pass of a transformers model over the rows of several texts.

Shapes: R rows of a pass, K input channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from omnidraft.snapshots.low_rank import SCALE, A, B, factored_modules

TextFactors = Mapping[str, Tensor]
"""A snapshot's factors by name, in bfloat16."""


class RowFactors:
    """Adds factors to the linear layers of one model, a text's factors to the rows of that text only."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._texts: list[tuple[slice, TextFactors]] = []
        """The rows of the pass under way that have factors."""
        self._hooked: set[str] = set()

    def require_fitting(self, tensors: Mapping[str, Tensor]) -> TextFactors:
        """Return these factors for texts of the model. Raises SnapshotCorrupt when they do not fit it."""
        modules = dict(self._model.named_modules())
        shapes = {
            name: (module.out_features, module.in_features)
            for name, module in modules.items()
            if hasattr(module, "in_features")
        }
        for name in set(factored_modules(shapes, tensors)) - self._hooked:
            modules[name].register_forward_hook(partial(self._add, name))
            self._hooked.add(name)
        device = next(self._model.parameters()).device
        return {name: tensor.to(device, torch.bfloat16) for name, tensor in tensors.items()}

    @contextmanager
    def added(self, texts: Sequence[tuple[int, TextFactors | None]]) -> Iterator[None]:
        """Add these factors inside the `with` block, each to so many rows of a pass, which are in this order."""
        start = 0
        for num_rows, factors in texts:
            if factors is not None:
                self._texts.append((slice(start, start + num_rows), factors))
            start += num_rows
        try:
            yield
        finally:
            self._texts = []

    def _add(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        own = [(rows, factors) for rows, factors in self._texts if name + A in factors]
        if not own:
            return None
        x_1RK: Tensor = inputs[0]
        changed = output.clone()
        for rows, factors in own:
            reduced = x_1RK[:, rows].float() @ factors[name + A].float().T
            changed[:, rows] += (SCALE * (reduced @ factors[name + B].float().T)).to(output.dtype)
        return changed
