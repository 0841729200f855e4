"""Write a drafter as a GGUF file for llama.cpp: the file of its base drafter with other weights in it.

The base drafter's file has the tokenizer and all settings as its authors converted them with llama.cpp's own script, so
nothing is guessed; gguf-py knows each tensor's name. A drafter with the target's vocabulary takes the tokenizer of the
target's file: llama.cpp drafts within one vocabulary only. What llama.cpp lays out otherwise than transformers is known
here for ARCHITECTURES only.
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
_WRITTEN_HERE = ("general.architecture", "general.file_type")
_VOCAB_SIZE = ".vocab_size"
_EMBEDDING, _TIED = "token_embd.weight", "output.weight"
"""A file without the second uses the first as the head."""
_TOKENIZER, _TOKENS = "tokenizer.", "tokenizer.ggml.tokens"


def write_gguf(model: PreTrainedModel, base: Path, file: Path, *, tokenizer: Path | None = None) -> None:
    """Write the model's weights, in bfloat16 if that is their format and else in float32.

    Args:
        base: the GGUF file of the same model with other weights.
        tokenizer: the GGUF file with the tokenizer of this model; None: the base's own.

    Raises:
        ModelError: it is none of ARCHITECTURES, or a file is of another model.
        OSError: the file cannot be written.
    """
    reader, spelling = GGUFReader(base), GGUFReader(tokenizer or base)
    architecture = _architecture(reader)
    _require_tokens(spelling, model.config.get_text_config().vocab_size)
    kind = _format_of(model)
    writer = GGUFWriter(file, architecture)
    try:
        _add_fields(reader, spelling, writer)
        writer.add_vocab_size(model.config.get_text_config().vocab_size)
        writer.add_file_type(LlamaFileType.MOSTLY_BF16 if kind == GGMLQuantizationType.BF16 else LlamaFileType.ALL_F32)
        _add_tensors(reader, _named_weights(model, architecture), kind, writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def require_writable(base: Path, tokenizer: Path, vocab_size: int) -> None:
    """Raise ModelError where `write_gguf` would refuse these files for a model of so many tokens."""
    _architecture(GGUFReader(base))
    _require_tokens(GGUFReader(tokenizer), vocab_size)


def _architecture(reader: GGUFReader) -> str:
    """Return the architecture of a file. Raises ModelError when it is none of ARCHITECTURES."""
    architecture = str(reader.fields["general.architecture"].contents())
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{architecture} is none of {', '.join(ARCHITECTURES)}; export a Hugging Face folder instead, and convert "
            "it with llama.cpp's convert_hf_to_gguf.py"
        )
    return architecture


def _require_tokens(spelling: GGUFReader, vocab_size: int) -> None:
    num_tokens = len(spelling.fields[_TOKENS].contents()) if _TOKENS in spelling.fields else None
    if num_tokens != vocab_size:
        raise ModelError(f"the drafter has {vocab_size} tokens, the GGUF file with its tokenizer {num_tokens}")


def _format_of(model: PreTrainedModel) -> GGMLQuantizationType:
    return GGMLQuantizationType.BF16 if model.dtype == torch.bfloat16 else GGMLQuantizationType.F32


def _add_fields(reader: GGUFReader, spelling: GGUFReader, writer: GGUFWriter) -> None:
    own = [field for field in reader.fields.values() if not field.name.startswith(("GGUF.", _TOKENIZER))]
    for field in own:
        if field.name not in _WRITTEN_HERE and not field.name.endswith(_VOCAB_SIZE):
            copy_field(field, writer)
    for field in spelling.fields.values():
        if field.name.startswith(_TOKENIZER):
            copy_field(field, writer)


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
        if name not in (_EMBEDDING, _TIED) and shapes.get(name) != weight.shape:
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
        is_query = ".attn_q." in known
        if architecture == "llama" and (is_query or ".attn_k." in known):
            weight = _interleaved(weight, config.num_attention_heads if is_query else config.num_key_value_heads)
        weights[known] = weight
    return weights


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows of a matrix, or the numbers of a bias, of each head in llama.cpp's order: the pairs that a rotary
    embedding turns side by side."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
