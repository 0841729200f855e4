"""The weights of a GGUF file as transformers names them and lays them out.

Shapes: E experts, I inner channels, H hidden channels.
"""

import re
from collections.abc import Iterable
from typing import Any

import gguf
import torch

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_architectures import OTHERWISE, ROPE_TENSORS, architecture_of
from omnidraft.models.catalog.gguf_file import GgufFile

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
_HEAD_NORM = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight")


def fill(model: Any, source: GgufFile) -> None:
    """Give a model the weights of a file. Raises ModelError where one of them has weights that the other lacks."""
    weights = _Weights(source, model.config.num_attention_heads, model.config.num_key_value_heads)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    expected = {name: each for name, each in model.state_dict().items() if name not in tied}
    state = {name: weights.of(name, each) for name, each in expected.items()}
    if unread := source.tensors.keys() - weights.read - set(ROPE_TENSORS):
        raise ModelError(
            f"{source.name} has weights that {type(model).__name__} lacks ({_listed(unread)}); {OTHERWISE}"
        )
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()


class _Weights:
    """The weights of a file as transformers has them."""

    def __init__(self, source: GgufFile, num_heads: int, num_key_heads: int) -> None:
        self._source = source
        self._row = architecture_of(source)
        self._heads = {"q_proj": num_heads, "k_proj": num_key_heads}
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == source.architecture)
        num_layers = int(source.needed(f"{source.architecture}.block_count"))
        self._names = gguf.get_tensor_name_map(kind, num_layers)
        self.read: set[str] = set()
        """The names of the tensors that were used."""

    def of(self, name: str, expected: torch.Tensor) -> torch.Tensor:
        """Return a weight of the model, a bias that the file lacks as zeros. Raises ModelError for what does not fit.

        Args:
            expected: of its shape and format.
        """
        values = self._values(name)
        if values is None:
            if not name.endswith("bias"):
                raise ModelError(f"{self._source.name} has no weights for {name}: it is incomplete")
            values = torch.zeros(expected.shape)
        if values.numel() != expected.numel():
            sizes = f"{tuple(values.shape)} for {name}, which needs {tuple(expected.shape)}"
            raise ModelError(f"{self._source.name} has weights of {sizes}")
        return values.reshape(expected.shape).to(expected.dtype)

    def _values(self, name: str) -> torch.Tensor | None:
        if experts := _EXPERTS.fullmatch(name):
            return self._experts(*experts.groups())
        if norm := _HEAD_NORM.fullmatch(name):
            layer, which, head = norm.groups()
            values = self._tensor(f"blk.{layer}.attn_{which}_norm.weight")
            return None if values is None else values[int(head)]
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is not None and not found.endswith((".weight", ".bias")):
            found = f"{found}.weight"  # attention sinks
        values = self._tensor(found)
        if values is None:
            return None
        if self._row.adds_one and name.endswith("norm.weight"):
            return values - 1
        num_heads = self._heads.get(name.split(".")[-2]) if self._row.is_permuted else None
        return values if num_heads is None else _unpermuted(values, num_heads)

    def _experts(self, layer: str, which: str, bias: str | None) -> torch.Tensor | None:
        kind, is_gpt_oss = "bias" if bias else "weight", self._source.architecture == "gpt-oss"
        tensors = [self._tensor(f"blk.{layer}.ffn_{part}_exps.{kind}") for part in which.split("_")]
        parts = [each for each in tensors if each is not None]
        if len(parts) < len(tensors):
            return None
        if not is_gpt_oss:
            return torch.cat(parts, dim=1)
        values = torch.stack(parts, dim=2).flatten(1, 2) if len(parts) > 1 else parts[0]
        return values if bias else values.transpose(1, 2).contiguous()

    def _tensor(self, name: str | None) -> torch.Tensor | None:
        if name not in self._source.tensors:
            return None
        self.read.add(name)
        return self._source.values(name)


def _unpermuted(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return rows of queries or keys with the first halves of all pairs before the second ones, head by head."""
    size = len(values) // num_heads
    pairs = values.reshape(num_heads, size // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3])
