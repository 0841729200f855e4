"""The weights of a GGUF file as transformers names them and lays them out, and those of a model as a file has them."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import gguf
import torch

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_architectures import OTHERWISE, architecture_of
from omnidraft.models.catalog.gguf_file import GgufFile
from omnidraft.models.catalog.gguf_layouts import COMMON

_LAYER = re.compile(r"\.(\d+)\.")
_HEAD_NORM = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight")
ENDINGS = (".weight", ".bias")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
"""A file without the second uses the first as the head."""


def fill(model: Any, source: GgufFile) -> None:
    """Give a model the weights of a file. Raises ModelError where one of them has weights that the other lacks."""
    row = architecture_of(source)
    weights = _Weights(model, source, source.weights.keys(), source.values)
    state = {
        name: row.read(name, weights.of(name, each.shape)).to(each.dtype) for name, each in _own_state(model).items()
    }
    weights.require_all_read(OTHERWISE)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()


def laid_out(model: Any, base: GgufFile) -> dict[str, torch.Tensor]:
    """Return the weights of a model in float32, by the names and in the layout of a file: what `fill` would read to
    make this model. Raises ModelError where one of them has weights that the other lacks.

    `fill` reads the place of each number instead, and so tells where in the file the numbers of the model belong,
    whatever it does with an architecture.

    Args:
        base: of the same model with other weights; the number of its tokens may differ.
    """
    row = architecture_of(base)
    state = {name: each.detach() for name, each in _own_state(model).items()}
    shapes = {name: base.shape(name) for name in base.weights if name != _HEAD}
    shapes[_EMBEDDING] = tuple(model.get_input_embeddings().weight.shape)
    if "lm_head.weight" in state:
        shapes[_HEAD] = tuple(state["lm_head.weight"].shape)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=1), strict=False))

    def places_of(name: str) -> torch.Tensor:
        return torch.arange(starts[name], starts[name] + sizes[name]).view(shapes[name])

    weights = _Weights(model, base, shapes.keys(), places_of)
    numbers = torch.empty(1 + sum(sizes.values()))
    for name, weight in state.items():
        places = weights.of(name, weight.shape).long()
        if not places.any() and weight.any():
            raise ModelError(f"{base.name} has no place for {name}: it is of another model")
        numbers[places] = row.written(name, weight.float())
    weights.require_all_read("it is of another model")
    return {name: numbers[start : start + sizes[name]].view(shapes[name]) for name, start in starts.items()}


def _own_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model, those that it has twice once."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: each for name, each in model.state_dict().items() if name not in tied}


class _Weights:
    """The weights of a file by transformers' names, in its layout."""

    def __init__(self, model: Any, source: GgufFile, tensors: Set[str], values: Callable[[str], torch.Tensor]) -> None:
        """
        Args:
            model: that shall have them.
            tensors: the names of those in the file.
            values: returns one of them.
        """
        self._model, self._source, self._tensors, self._values_of = model, source, tensors, values
        own = architecture_of(source).layouts
        self._layouts = {**own, **COMMON, **own}  # its own come first
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == source.architecture)
        num_layers = int(source.needed(f"{source.architecture}.block_count"))
        self._names = gguf.get_tensor_name_map(kind, num_layers)
        self._read: set[str] = set()
        """The names of the tensors that were used."""

    def require_all_read(self, advice: str) -> None:
        """Raise ModelError where a tensor was not used."""
        if unread := self._tensors - self._read:
            raise ModelError(
                f"{self._source.name} has weights that {type(self._model).__name__} lacks ({_listed(unread)}); {advice}"
            )

    def of(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return the numbers of a weight as the file has them, zeros for a bias that it lacks. Raises ModelError for
        what does not fit."""
        values = self._values(name)
        if values is None:
            if not name.endswith("bias"):
                raise ModelError(f"{self._source.name} has no weights for {name}: it is incomplete")
            values = torch.zeros(shape)
        if values.numel() != shape.numel():
            sizes = f"{tuple(values.shape)} for {name}, which needs {tuple(shape)}"
            raise ModelError(f"{self._source.name} has weights of {sizes}")
        return values.reshape(shape)

    def _values(self, name: str) -> torch.Tensor | None:
        if norm := _HEAD_NORM.fullmatch(name):
            layer, which, head = norm.groups()
            return self._tensor(f"blk.{layer}.attn_{which}_norm.weight")[int(head)]
        for ending, (tensors, layout) in self._layouts.items():
            if name.endswith(ending) and (parts := self._of_layer(name, tensors)):
                return layout(self._source, *parts)
        found = self._names.get_name(name, ENDINGS) or self._names.get_name(
            name.replace("model", "backbone", 1), ENDINGS
        )
        return next((self._tensor(f"{found}{end}") for end in ("", *ENDINGS) if f"{found}{end}" in self._tensors), None)

    def _of_layer(self, name: str, tensors: Sequence[str]) -> list[torch.Tensor]:
        """Return these tensors of a weight's layer; none where the file has not all of them."""
        layer = _LAYER.search(name)
        names = [f"blk.{layer[1]}.{tensor}" for tensor in tensors] if layer else []
        if not self._tensors >= set(names):
            names = [each.replace("_shexp", "") for each in names]  # of a Granite without others
        return [self._tensor(each) for each in names] if self._tensors >= set(names) else []

    def _tensor(self, name: str) -> torch.Tensor:
        self._read.add(name)
        return self._values_of(name)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3])
