"""A GGUF file with all its parts: settings, and tensors as values.

The package `gguf` parses metadata entry by entry through a memory map, and dequantises in numpy; here it slices a plain
array over the same pages, and torch dequantises what it can, a few rows at a time. That is three times as fast, with
the same bits.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from omnidraft.errors import ModelError
from omnidraft.models.weights_name import gguf_parts

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Factors of rotary frequencies, which are settings in transformers."""
_LAYER = re.compile(r"blk\.(\d+)\.")
ROWS = 256  # dequantised at once: few enough for a processor's cache, enough to pay for a call of torch


class GgufFile:
    """What a GGUF file and its other parts say."""

    def __init__(self, file: Path) -> None:
        """Raises ModelError where a part is missing, cut short or no GGUF file."""
        readers = [_opened(part) for part in gguf_parts(file)]
        self.name = file.name
        self.fields = readers[0].fields
        self.tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self.architecture = str(self.get("general.architecture", ""))
        prefix = f"{self.architecture}."
        own = (field for field in self.fields.values() if field.name.startswith(prefix))
        self.settings = {field.name.removeprefix(prefix): field.contents() for field in own}
        """Those of the architecture."""

    @property
    def num_layers(self) -> int:
        """Without those that draft for the others."""
        return self.count("block_count") - int(self.setting("nextn_predict_layers", 0))

    @property
    def weights(self) -> dict[str, gguf.ReaderTensor]:
        """The tensors that are weights of the model, and no settings or layers that draft for it."""
        end = self.num_layers
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if name not in ROPE_TENSORS and not ((layer := _LAYER.match(name)) and int(layer[1]) >= end)
        }

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata."""
        return self.fields[key].contents() if key in self.fields else default

    def needed(self, key: str) -> Any:
        """Return a value of the metadata. Raises ModelError where the file has none."""
        if key not in self.fields:
            raise ModelError(f"{self.name} has no {key}: an old converter made it; take a newer file of the same model")
        return self.fields[key].contents()

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting, which may be named once for each layer; 0 stands for layers without. Raises ModelError
        where layers differ."""
        value = self.settings.get(key, default)
        if not isinstance(value, list):
            return value
        different = set(value) - {0}
        if len(different) > 1:
            raise ModelError(f"{self.name} has layers that differ ({key}), which is not converted")
        return different.pop() if different else 0

    def by_layer(self, key: str) -> list[Any]:
        """Return a setting of each layer."""
        value = self.needed(f"{self.architecture}.{key}")
        return value if isinstance(value, list) else [value] * self.count("block_count")

    def count(self, key: str) -> int:
        """Return a setting that every file has. Raises ModelError where this one has not."""
        self.needed(f"{self.architecture}.{key}")
        return int(self.setting(key))

    @property
    def whole_head_size(self) -> int:
        """The size of a head where all together are as wide as the model."""
        return self.count("embedding_length") // max(self.count("attention.head_count"), 1)

    @property
    def head_size(self) -> int:
        return int(self.setting("attention.key_length", self.whole_head_size))

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor as torch has it."""
        return tuple(int(size) for size in reversed(self.tensors[tensor].shape))

    def values(self, tensor: str) -> torch.Tensor:
        """Return the values of a tensor in float32."""
        found = self.tensors[tensor]
        return torch.from_numpy(dequantize(found.data, found.tensor_type))


def dequantize(data: npt.NDArray[Any], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Return the values of a tensor in float32.

    Args:
        data: shape [..., bytes of a row] for a quantised tensor, its values otherwise; writable, as torch wants it.
        kind: how they are stored.
    """
    from transformers.integrations.gguf import dequant

    if kind.value not in dequant.GGML_BLOCK:
        return gguf.quants.dequantize(data, kind)
    rows = torch.from_numpy(data).reshape(-1, data.shape[-1])
    shape = gguf.quant_shape_from_byte_shape(data.shape, kind)
    values = torch.empty(len(rows), shape[-1])
    for source, sink in zip(rows.split(ROWS), values.split(ROWS), strict=True):
        sink.view(-1).copy_(dequant.dequantize(source, kind.value))
    return values.reshape(shape).numpy()


class _ArrayReader(gguf.GGUFReader):
    @property  # type: ignore[override]
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of the file."""
        return self._data

    @data.setter
    def data(self, file: npt.NDArray[np.uint8]) -> None:
        self._data = np.asarray(file)


def _opened(file: Path) -> _ArrayReader:
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
        if start[:4] != b"GGUF":
            raise ModelError(f"{file.name} is {_kind_of(start)}, and no GGUF file; fetch the file itself")
        return _ArrayReader(file, mode="c")  # writable, yet never written
    except FileNotFoundError as exc:
        raise ModelError(f"{file.name} is missing, without which the other parts are no model") from exc
    except (ValueError, IndexError, OverflowError) as exc:
        if "GGMLQuantizationType" in str(exc):
            raise ModelError(f"{file.name} has weights in a format that is not known here: {exc}") from exc
        raise ModelError(f"{file.name} ends early, or is damaged; fetch it again") from exc


def _kind_of(start: bytes) -> str:
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS"
    return "a web page" if start.lstrip().startswith(b"<") else "another kind of file" if start else "empty"
