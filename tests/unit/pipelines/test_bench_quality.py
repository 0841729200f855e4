"""The benchmark of quality: the 16-bit model against itself, and a model whose channels are in another order."""

import json
import sys
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM

from omnidraft.errors import ModelError, RequestError
from omnidraft.models.hf.target import load_model
from omnidraft.models.hf.tokenizer import load_tokenizer
from pipelines.bench.quality import __main__ as command
from pipelines.bench.quality import texts
from pipelines.bench.quality.permuted_gguf import write_permuted
from tests.tiny_gguf import write_gguf_beside

TEXT = {"prompt": "How many clips did Natalia sell?", "reference": "Natalia sold 48 of them."}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "clips.jsonl"
    rows = [{"question": "learned from", "split": "train"}, *(TEXT | {"split": "test"} for _ in range(3))]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_model_in_16_bits_is_compared_with_itself(
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
    tmp_path: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The perplexity of packed16 is that of transformers in float32, and its greedy tokens are its own."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    monkeypatch.setattr(sys, "argv", ["quality"])
    command.main(
        prompts_paths=[prompts],
        target=str(tiny_models[0]),
        systems="omnidraft",
        formats="packed16,int4",
        permute=False,
        num_tokens=30,
        num_prompts=2,
        answer_tokens=5,
        json_path=tmp_path / "quality.json",
    )
    row, rounded = json.loads((tmp_path / "quality.json").read_text())["rows"]
    tokenizer, model = load_tokenizer(tiny_models[0]), load_model(tiny_models[0]).float()
    (window,) = texts.read(prompts, tokenizer, num_tokens=30, num_prompts=1).windows
    loss = model(input_ids=torch.tensor([list(window)]), labels=torch.tensor([list(window)])).loss
    assert row["perplexity"] == pytest.approx(exp(float(loss)), rel=1e-3)
    assert (row["greedy_equal"], row["tokens"], row["greedy_tokens"]) == (1.0, 29, 10)
    assert (row["perplexity_ratio"], row["perplexity_ratio_error"], row["best_equal"]) == (1.0, 0.0, 1.0)
    assert row["bits_per_weight"] == 16
    assert rounded["perplexity"] / row["perplexity"] == pytest.approx(rounded["perplexity_ratio"])
    assert 0 < rounded["perplexity_ratio_error"] < 0.1
    assert rounded["best_equal_error"] == pytest.approx(
        (rounded["best_equal"] * (1 - rounded["best_equal"]) / 29) ** 0.5
    )


def test_texts_are_windows_of_prompts_with_answers_and_the_test_split_is_first(
    tiny_models: tuple[Path, Path], prompts: Path
) -> None:
    tokenizer = load_tokenizer(tiny_models[0])
    read = texts.read(prompts, tokenizer, num_tokens=texts.WINDOW, num_prompts=4)
    whole = "".join(f"{TEXT['prompt']}\n{TEXT['reference']}\n\n" for _ in range(3)) + "learned from\n\n\n"
    assert tokenizer.vocabulary.spell(read.windows[0]).decode() == whole
    assert len(read.prompts) == 4
    with pytest.raises(RequestError, match="cannot read "):
        texts.read(prompts.with_name("none"), tokenizer, num_tokens=8, num_prompts=1)


def test_a_line_separator_inside_a_text_ends_no_row(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "odd.jsonl", load_tokenizer(tiny_models[0])
    path.write_text(json.dumps({"prompt": "one\u2028text", "answer": "yes"}, ensure_ascii=False), encoding="utf-8")
    (window,) = texts.read(path, tokenizer, num_tokens=texts.WINDOW, num_prompts=1).windows
    assert tokenizer.vocabulary.spell(window).decode() == "one\u2028text\nyes\n\n"


def test_another_order_of_channels_changes_no_logit(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.symlink_to(tiny_models[0])
    gguf = write_gguf_beside(folder)
    write_permuted(gguf, tmp_path / "permuted.gguf")
    ids = torch.arange(40)[None]
    models: list[Any] = [_loaded(gguf), _loaded(tmp_path / "permuted.gguf")]
    ours, theirs = (model(ids).logits for model in models)
    assert torch.allclose(ours, theirs, atol=1e-4)
    first, second = (model.model.layers[0].mlp.down_proj.weight for model in models)
    assert not torch.allclose(first, second)
    assert torch.allclose(first.flatten().sort().values, second.flatten().sort().values)


def _loaded(gguf: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)


def test_bfloat16_matrices_are_permuted_by_weights_not_by_bytes(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "one.gguf", "qwen2")
    for name, number in {"embedding_length": 8, "feed_forward_length": 4, "block_count": 1}.items():
        writer.add_uint32(f"qwen2.{name}", number)
    for name in ("head_count", "head_count_kv"):
        writer.add_uint32(f"qwen2.attention.{name}", 2)
    weights = np.arange(16, dtype=np.uint16).reshape(2, 8) + 0x1200
    writer.add_tensor("output.weight", weights.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_permuted(tmp_path / "one.gguf", tmp_path / "other.gguf")
    (tensor,) = GGUFReader(tmp_path / "other.gguf").tensors
    got = tensor.data.view(np.uint16)
    assert not np.array_equal(got, weights)
    assert np.array_equal(np.sort(got, axis=1), weights)


def test_a_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "one.gguf", "gemma3")
    writer.add_tensor("output.weight", np.zeros((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="gemma3"):
        write_permuted(tmp_path / "one.gguf", tmp_path / "other.gguf")
