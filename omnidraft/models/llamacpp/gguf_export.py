"""Write a drafter as a GGUF file for llama.cpp: the file of its base drafter with other weights in it.

The base drafter's file has the tokenizer and all settings as its authors converted them with llama.cpp's own script, so
nothing is guessed; gguf-py knows each tensor's name. What llama.cpp lays out otherwise than transformers is known here
for ARCHITECTURES only.
Shapes: N output channels, K input channels.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    ReaderField,
    get_tensor_name_map,
    quants,
)
from transformers import PreTrainedModel

from omnidraft.errors import ModelError

ARCHITECTURES = ("llama", "qwen2")
_FILE_TYPE = "general.file_type"
_WRITTEN_BY_GGUF = ("general.architecture", _FILE_TYPE)
_TIED = "output.weight"
"""A file without it uses the embedding as the head."""


def write_gguf(model: PreTrainedModel, base: Path, file: Path) -> None:
    """Write the model's weights, in bfloat16 if that is their format and else in float32.

    Args:
        base: the GGUF file of the same model with other weights.

    Raises:
        ModelError: it is none of ARCHITECTURES, or the file is of another model.
        OSError: the file cannot be written.
    """
    reader = GGUFReader(base)
    architecture = str(reader.fields["general.architecture"].contents())
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{architecture} is none of {', '.join(ARCHITECTURES)}; export with --as hf, and convert that folder with "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    kind = _format_of(model)
    writer = GGUFWriter(file, architecture)
    try:
        _add_fields(reader, kind, writer)
        _add_tensors(reader, _named_weights(model, architecture), kind, writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _format_of(model: PreTrainedModel) -> GGMLQuantizationType:
    return GGMLQuantizationType.BF16 if model.dtype == torch.bfloat16 else GGMLQuantizationType.F32


def _add_fields(reader: GGUFReader, kind: GGMLQuantizationType, writer: GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name not in _WRITTEN_BY_GGUF and not field.name.startswith("GGUF."):
            copy_field(field, writer)
    is_short = kind == GGMLQuantizationType.BF16
    writer.add_file_type(LlamaFileType.MOSTLY_BF16 if is_short else LlamaFileType.ALL_F32)


def copy_field(field: ReaderField, writer: GGUFWriter) -> None:
    """Add a field of one file to another."""
    is_array = field.types[0] == GGUFValueType.ARRAY
    writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if is_array else None)


def _add_tensors(
    reader: GGUFReader, weights: Mapping[str, np.ndarray], kind: GGMLQuantizationType, writer: GGUFWriter
) -> None:
    """Add the model's weights, and the file's tables that are none of them, such as factors of rotary embeddings."""
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    for name, weight in weights.items():
        if name != _TIED and shapes.get(name) != weight.shape:
            raise ModelError(f"{name}: the drafter has {weight.shape}, its GGUF file {shapes.get(name)}")
        if weight.ndim < 2 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, quants.quantize(weight, kind), raw_dtype=kind)
    for tensor in reader.tensors:
        if tensor.name not in weights and tensor.name != _TIED:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


def _named_weights(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """Return the weights in float32, by llama.cpp's names and in its layout. Raises ModelError."""
    config = model.config.get_text_config()
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    weights = {}
    for name, parameter in model.named_parameters():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ModelError(f"llama.cpp has no tensor for {name} in models of {architecture}")
        weight = parameter.detach().float().numpy()
        if architecture == "llama" and known.endswith((".attn_q.weight", ".attn_k.weight")):
            is_query = known.endswith(".attn_q.weight")
            weight = _interleaved(weight, config.num_attention_heads if is_query else config.num_key_value_heads)
        weights[known] = weight
    return weights


def _interleaved(weight_NK: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows of each head in llama.cpp's order: the pairs that a rotary embedding turns side by side."""
    halves = weight_NK.reshape(num_heads, 2, -1, weight_NK.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight_NK.shape))
