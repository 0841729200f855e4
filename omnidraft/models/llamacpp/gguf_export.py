"""Write a drafter as a GGUF file for llama.cpp: the file of its base drafter with other weights in it.

The base drafter's file has the tokenizer and all settings as its authors converted them with llama.cpp's own script, so
nothing is guessed. A drafter with the target's vocabulary takes the tokenizer of the target's file: llama.cpp drafts
within one vocabulary only.
"""

from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, ReaderField, quants
from transformers import PreTrainedModel

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_architectures import ARCHITECTURES
from omnidraft.models.catalog.gguf_file import GgufFile
from omnidraft.models.catalog.gguf_weights import laid_out

_WRITTEN_HERE = ("general.architecture", "general.file_type")
_NOT_KEPT = ("GGUF.", "split.", "tokenizer.")
_VOCAB_SIZE = ".vocab_size"
_TOKENIZER, _TOKENS = "tokenizer.", "tokenizer.ggml.tokens"
_FLOAT32 = ("_norm.weight", ".ffn_gate_inp.weight")
"""What llama.cpp keeps in float32, beside what has one dimension."""


def write_gguf(model: PreTrainedModel, base: Path, file: Path, *, tokenizer: Path | None = None) -> None:
    """Write the model's weights, in bfloat16 if that is their format and else in float32.

    Args:
        base: the GGUF file of the same model with other weights.
        tokenizer: the GGUF file with the tokenizer of this model; None: the base's own.

    Raises:
        ModelError: it is none of ARCHITECTURES, or a file is of another model.
        OSError: the file cannot be written.
    """
    source, spelling = _writable(base), GgufFile(tokenizer or base)
    _require_tokens(spelling, model.config.get_text_config().vocab_size)
    weights = laid_out(model, source)
    kind = GGMLQuantizationType.BF16 if model.dtype == torch.bfloat16 else GGMLQuantizationType.F32
    writer = GGUFWriter(file, source.architecture)
    try:
        _add_fields(source, spelling, writer)
        writer.add_vocab_size(model.config.get_text_config().vocab_size)
        writer.add_file_type(LlamaFileType.MOSTLY_BF16 if kind == GGMLQuantizationType.BF16 else LlamaFileType.ALL_F32)
        for name, weight in weights.items():
            is_float32 = weight.ndim < 2 or name.endswith(_FLOAT32)
            form = GGMLQuantizationType.F32 if is_float32 else kind
            writer.add_tensor(name, quants.quantize(weight.numpy(), form), raw_dtype=form)
        for name, tensor in source.tensors.items():
            if name not in source.weights:
                writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def require_writable(base: Path, tokenizer: Path, vocab_size: int) -> None:
    """Raise ModelError where `write_gguf` would refuse these files for a model of so many tokens."""
    _writable(base)
    _require_tokens(GgufFile(tokenizer), vocab_size)


def _writable(base: Path) -> GgufFile:
    """Raises ModelError when it is of none of ARCHITECTURES."""
    source = GgufFile(base)
    if source.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{base.name} is of the architecture {source.architecture!r}, which is not written; export a Hugging Face "
            "folder instead, and convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    return source


def _require_tokens(spelling: GgufFile, vocab_size: int) -> None:
    if (num_tokens := len(spelling.get(_TOKENS, ()))) != vocab_size:
        raise ModelError(f"the drafter has {vocab_size} tokens, the GGUF file with its tokenizer {num_tokens}")


def _add_fields(source: GgufFile, spelling: GgufFile, writer: GGUFWriter) -> None:
    own = [field for field in source.fields.values() if not field.name.startswith(_NOT_KEPT)]
    for field in own:
        if field.name not in _WRITTEN_HERE and not field.name.endswith(_VOCAB_SIZE):
            _copy_field(field, writer)
    for field in spelling.fields.values():
        if field.name.startswith(_TOKENIZER):
            _copy_field(field, writer)


def _copy_field(field: ReaderField, writer: GGUFWriter) -> None:
    """Add a field of one file to another."""
    is_array = field.types[0] == GGUFValueType.ARRAY
    writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if is_array else None)
