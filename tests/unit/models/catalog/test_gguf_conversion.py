"""A GGUF file becomes the model that it was written from, of any architecture in the table; or it is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_architectures import ARCHITECTURES
from omnidraft.models.catalog.gguf_conversion import convert
from tests.tiny_gguf import ARCHITECTURES as WRITTEN
from tests.tiny_gguf import write_gguf, written
from tests.unit.models.catalog.converted import CONVERTED, TOKENS
from tests.unit.models.catalog.gguf_families import GGUF_FAMILIES, gguf_family_model
from tests.unit.models.tiny import SHAPE, VOCAB_SIZE, tiny_model

IDS = torch.arange(80)[None] * 7 % VOCAB_SIZE  # past Phi-4-mini's first context


def _converted(model: Any, folder: Path) -> Path:
    file = write_gguf(model, folder / "tiny.gguf", TOKENS, [gguf.TokenType.NORMAL] * VOCAB_SIZE)
    (folder / "made").mkdir()
    convert(file, folder / "made")
    return folder / "made"


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_file_gives_the_logits_of_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    model = gguf_family_model(name)
    folder = _converted(model, tmp_path)
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(made(IDS).logits, model(IDS).logits, atol=1e-4, rtol=0)
    assert made.config.max_position_embeddings == model.config.max_position_embeddings


def test_every_architecture_is_tried() -> None:
    types = {tiny.model_type for tiny in GGUF_FAMILIES.values()}
    converted = {record["architecture"] for record in CONVERTED.values()}
    assert {WRITTEN.get(each, each) for each in types} | converted == set(ARCHITECTURES)


def test_weights_are_bf16_and_both_of_two_embeddings_are_kept(tmp_path: Path) -> None:
    """Qwen2.5 ties them, but its files have both, quantised separately."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    folder = _converted(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["dtype"]) == (False, "bfloat16")
    made = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(made.lm_head.weight, model.lm_head.weight.bfloat16())


def test_biases_that_the_model_of_transformers_lacks_are_refused(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.model.norm.bias = torch.nn.Parameter(torch.ones(SHAPE["hidden_size"]))
    with pytest.raises(ModelError, match=r"tiny\.gguf has weights that LlamaForCausalLM lacks \(output_norm\.bias\)"):
        _converted(model, tmp_path)


def test_a_file_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would make them at random."""
    model = copy.deepcopy(tiny_model("llama"))
    model.config.num_hidden_layers += 1
    with pytest.raises(ModelError, match=r"tiny\.gguf has no weights for model\.layers\.3\..*: it is incomplete"):
        _converted(model, tmp_path)


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (lambda writer: writer.add_clamp_kqv(3.0), r"settings that are not converted \(attention\.clamp_kqv\)"),
        (lambda writer: writer.add_expert_weights_scale(2.0), r"not converted \(expert_weights_scale\)"),
        (lambda writer: writer.add_head_count_kv([2, 1, 2]), r"layers that differ \(attention\.head_count_kv\)"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", torch.arange(1, 9).float().numpy()), r"rope_freqs"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), r"by 'longrope', and lacks"),
    ],
    ids=["setting", "experts", "layers", "frequencies", "factors"],
)
def test_what_the_model_of_transformers_would_compute_without_is_refused(
    add: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = gguf.GGUFWriter.write_header_to_file
    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", lambda self: (add(self), written(self)))
    with pytest.raises(ModelError, match=expected):
        _converted(tiny_model("llama"), tmp_path)


def test_an_architecture_that_is_not_known_is_refused_with_what_to_do(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "never-heard-of")
    written(writer, tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"architecture 'never-heard-of', which is not converted; .*'llamacpp'"):
        convert(tmp_path / "x.gguf", tmp_path)


def test_a_granite_without_positions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gguf_family_model("Granite 3")
    monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda self, size: self.add_rope_scaling_finetuned(False))
    with pytest.raises(ModelError, match=r"tiny\.gguf has layers without positions, which is not converted"):
        _converted(model, tmp_path)
