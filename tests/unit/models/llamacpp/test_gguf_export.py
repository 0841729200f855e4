"""A drafter becomes its base's file with other weights; llama.cpp says of it what transformers says of the drafter."""

import copy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_file import GgufFile
from omnidraft.models.llamacpp.context import LlamaModel
from omnidraft.models.llamacpp.gguf_export import write_gguf
from omnidraft.models.llamacpp.target import LlamaCppTarget
from tests import tiny_gguf
from tests.unit.models.catalog.gguf_families import GGUF_FAMILIES, gguf_family_model
from tests.unit.models.drafted_trees import chain
from tests.unit.models.tiny import VOCAB_SIZE, text, tiny_model, whole_pass
from tests.unit.models.tiny_llamacpp import require_llamacpp

UNLIKE = {
    "Phi-4-mini": "takes its long factors",
    "EXAONE 4": "knows windows by 64 layers",
    "Command R+": "knows norms of heads by 64 layers",
    "OLMoE": "wants heads that are together as wide as the model",
    "Nemotron": "wants heads that are together as wide as the model",
}
"""What llama.cpp does otherwise with tiny models."""
ROUNDED = {"atol": 0.015, "rtol": 0}
"""llama.cpp's GELU has 16 bits."""
TOKENS, TYPES = [f"w{token}" for token in range(VOCAB_SIZE)], [gguf.TokenType.NORMAL] * VOCAB_SIZE


def _exported(name: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    """A model that learned, and its file made from that of the model before."""
    model = gguf_family_model(name)
    base = tiny_gguf.write_gguf(model, folder / "base.gguf", TOKENS, TYPES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.rand_like(parameter) / 8)
    write_gguf(model, base, folder / "out.gguf")
    return model, folder / "out.gguf"


@pytest.mark.parametrize(
    "name", ["Llama with biases", "Gemma 3", "Phi-4-mini", "Granite 4", "Qwen3-MoE", "gpt-oss", "StableLM 2 12B"]
)
def test_a_file_has_the_learned_weights_in_llamacpps_layout_and_all_else_of_its_base(name: str, tmp_path: Path) -> None:
    model, file = _exported(name, tmp_path)
    made = GgufFile(file)
    expected = GgufFile(tiny_gguf.write_gguf(model, tmp_path / "expected.gguf", TOKENS, TYPES))
    assert made.tensors.keys() == expected.tensors.keys()
    for tensor in expected.tensors:
        assert made.shape(tensor) == expected.shape(tensor)
        np.testing.assert_array_equal(made.values(tensor).numpy(), expected.values(tensor).numpy())
    counted = {"GGUF.kv_count", "general.file_type"}
    assert {key: made.get(key) for key in made.fields.keys() - counted} == {
        key: expected.get(key) for key in expected.fields.keys() - counted
    }


@pytest.mark.parametrize("name", [name for name in GGUF_FAMILIES if name not in UNLIKE])
def test_llamacpp_says_of_the_file_what_transformers_says_of_the_model(name: str, tmp_path: Path) -> None:
    require_llamacpp()
    model, file = _exported(name, tmp_path)
    prompt = text(20)
    scores = LlamaCppTarget(LlamaModel(file), name="tiny", bits=32).open(prompt, 5, "fast").score(chain([prompt[-1]]))
    torch.testing.assert_close(scores, whole_pass(model, prompt)[-1:], **ROUNDED)


def test_the_base_of_another_model_is_refused(tmp_path: Path) -> None:
    """Without biases of queries, which the drafter has; with them, which it lacks; of an unknown architecture."""
    learned = {name: copy.deepcopy(tiny_model(name)) for name in ("llama", "qwen2")}
    learned["qwen2"].model.layers[0].self_attn.q_proj.bias.data.fill_(1)
    for base, other in (("llama", "qwen2"), ("qwen2", "llama")):
        file = tiny_gguf.write_gguf(tiny_model(base), tmp_path / f"{base}.gguf", TOKENS, TYPES)
        with pytest.raises(ModelError, match=rf"^{base}\.gguf has .* it is of another model$"):
            write_gguf(learned[other], file, tmp_path / "out.gguf")
    tiny_gguf.write_tokenizer_gguf(tmp_path / "other.gguf", "rwkv7")
    with pytest.raises(ModelError, match=r"architecture 'rwkv7', which is not written; export a Hugging Face folder"):
        write_gguf(tiny_model("llama"), tmp_path / "other.gguf", tmp_path / "out.gguf")
