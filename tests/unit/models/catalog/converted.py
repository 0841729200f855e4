"""What llama.cpp's converter (of llama-cpp-python 0.3.36) wrote of tiny models: settings, tensors and a digest.

converted.json is recorded by prototypes/gguf/record.py of the project's shared folder.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel

from omnidraft.models.catalog.gguf_file import GgufFile
from tests.tiny_gguf import written
from tests.unit.models.native.families import VOCAB_SIZE, family_config

CONVERTED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("converted.json").read_text())
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*_LETTERS, "ab", *(f"more{number}" for number in range(VOCAB_SIZE - len(_LETTERS) - 1))]
_OF_EXPONENTS = "ssm_a"


def numbered_model(model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
    """In float32, with weights that every machine makes alike and that bfloat16 has too."""
    model = AutoModelForCausalLM.from_config(family_config(model_type, changes), dtype=torch.float32)
    for index, weight in enumerate(model.state_dict().values()):
        weight.copy_(((torch.arange(weight.numel()) * 37 + index * 11) % 127 - 63).view(weight.shape) / 256)
    return model.eval()


def digest(file: GgufFile) -> str:
    """Of names, shapes and numbers of its weights but those whose last bit depends on a machine's exponential."""
    found = hashlib.sha256()
    for name in sorted(name for name in file.weights if not name.endswith(_OF_EXPONENTS)):
        found.update(f"{name} {[size for size in file.shape(name) if size != 1]}".encode())
        found.update(file.values(name).numpy().astype(np.float32).tobytes())
    return found.hexdigest()


def write_without_weights(name: str, file: Path, more: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """The file of a family with zeros for weights, and more tensors."""
    record = CONVERTED[name]
    writer = gguf.GGUFWriter(file, record["architecture"])
    for key, value in record["settings"].items():
        if isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(f"{record['architecture']}.{key}", value)
        else:
            inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(f"{record['architecture']}.{key}", value, gguf.GGUFValueType.get_type(value), inner)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_token_merges(["a b"])
    for tensor, shapes in {**record["tensors"], **more}.items():
        for shape, layers in shapes:
            for layer in layers:
                writer.add_tensor(tensor.replace("#", str(layer)), np.zeros(shape, np.float32))
    if factors := record.get("factors"):
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    return written(writer, file)
