"""The rows of recurrent layers one by one, as plain decoding computes them, with the state behind each.

transformers computes several rows of such a layer in chunks, which leaves the last state only, rounds in another way,
takes longer than a few rows one by one on a processor, and forgets the state before in some models. Here a layer's
projections are computed for all rows at once, and the rest row by row.
Shapes: R rows of a pass, H hidden size.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

LayerState = dict[str, dict[int, Tensor | None]]
_PARTS = ("conv_states", "recurrent_states")
_ENDS = ("out_proj", "o_proj")
"""Names of the projection that ends a layer."""


class RecurrentRows:
    """The recurrent layers of a model, whose states are in a cache of transformers."""

    def __init__(self, model: nn.Module) -> None:
        with_cache = {each for each in model.modules() if hasattr(each, "layer_idx") and _takes_cache(each)}
        self._layers: list[Any] = [each for each in with_cache if not with_cache & set(each.modules()) - {each}]

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def apart(self) -> Iterator[dict[int, list[LayerState]]]:
        """Compute the rows of a pass inside apart; the states of each layer, by row, are in what is yielded."""
        states: dict[int, list[LayerState]] = {each.layer_idx: [] for each in self._layers}
        for layer in self._layers:
            layer.forward = partial(_apart, layer, layer.forward, states[layer.layer_idx])
        try:
            yield states
        finally:
            for layer in self._layers:
                del layer.forward


def restore(cache: Any, states: Mapping[int, Sequence[LayerState]], row: int) -> None:
    """Give the cache's layers their states behind this row."""
    for number, rows in states.items():
        for part in _PARTS:
            setattr(cache.layers[number], part, rows[row][part])


def _takes_cache(module: nn.Module) -> bool:
    return "cache_params" in inspect.signature(module.forward).parameters


def _apart(
    layer: Any, forward: Any, states: list[LayerState], hidden_states: Tensor, cache_params: Any, **options: Any
) -> Tensor:
    cached, outputs, rows = cache_params.layers[layer.layer_idx], [], hidden_states.split(1, dim=1)
    projections = {name: each for name, each in layer.named_children() if hasattr(each, "in_features")}
    end = next((projections[name] for name in _ENDS if name in projections), None)
    for each in projections.values():
        each.forward = _unchanged if each is end else _of_rows(each.forward, hidden_states, rows)
    try:
        for row in rows:
            outputs.append(forward(row, cache_params=cache_params, **options))
            states.append({part: _copied(getattr(cached, part)) for part in _PARTS})
    finally:
        for each in projections.values():
            del each.forward
    joined_1RH = torch.cat(outputs, dim=1)
    return joined_1RH if end is None else end(joined_1RH)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _of_rows(project: Any, whole: Tensor, rows: Sequence[Tensor]) -> Any:
    """Return what projects rows of this whole, which is projected once, and other inputs by themselves."""
    numbers, projected = {id(row): number for number, row in enumerate(rows)}, cache(lambda: project(whole))
    return lambda x: projected()[:, numbers[id(x)], None] if id(x) in numbers else project(x)


def _copied(state: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {number: None if each is None else each.clone() for number, each in state.items()}
