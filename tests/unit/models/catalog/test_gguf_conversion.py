"""The repair of a converted tokenizer adds the missing parts and changes nothing else; files whose weights transformers
would not read whole are refused."""

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from omnidraft.errors import ModelError
from omnidraft.models.catalog import gguf_conversion
from omnidraft.models.catalog.gguf_conversion import (
    convert_tokenizer,
    repair_config,
    repair_tokenizer,
    require_known_biases,
    require_plain_rope,
)
from omnidraft.models.hf.tokenizer import load_tokenizer
from tests.tiny_gguf import write_gguf, write_scaled_gguf
from tests.unit.models.tiny import SHAPE, tiny_model

SPACE = "\u2581"


def byte_level(merges: list[list[str]]) -> dict[str, Any]:
    """A byte-level tokenizer as transformers makes it when it does not know the pre-tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges), "[PAD9]"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _parsed(tokenizer)


def runs_of_spaces() -> dict[str, Any]:
    """All merges of runs up to three, shortest run first, and one word; not the order of Gemma's makers."""
    merges = [(SPACE, SPACE), (SPACE, SPACE * 2), (SPACE * 2, SPACE), (SPACE, "a")]
    vocab = {token: index for index, token in enumerate([SPACE, "a", SPACE * 2, SPACE * 3, SPACE + "a"])}
    return _parsed(Tokenizer(models.BPE(vocab=vocab, merges=merges)))


def _parsed(tokenizer: Tokenizer) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(tokenizer.to_str())
    return parsed


def _pieces(tokenizer: dict[str, Any], text: str) -> list[str]:
    pieces: list[str] = Tokenizer.from_str(json.dumps(tokenizer)).encode(text).tokens
    return pieces


def test_smollm_digits_stand_alone() -> None:
    raw = byte_level([["1", "2"], ["a", "b"]])
    assert _pieces(raw, "ab12") == ["ab", "12"]
    assert _pieces(repair_tokenizer(raw, "smollm", ()), "ab12") == ["ab", "1", "2"]


def test_qwen_text_is_normalised_before_it_is_cut() -> None:
    fixed = repair_tokenizer(byte_level([]), "qwen2", ())
    assert _pieces(fixed, "e\u0301") == _pieces(fixed, "\u00e9")


def test_gemma_takes_the_longest_run_of_spaces_and_leaves_the_last_to_the_word() -> None:
    text = SPACE * 4 + "a"
    assert _pieces(runs_of_spaces(), text) == [SPACE * 2, SPACE * 2, "a"]
    assert _pieces(repair_tokenizer(runs_of_spaces(), "gemma3", ()), text) == [SPACE * 3, SPACE + "a"]


def test_gemma_keeps_the_order_of_all_other_merges() -> None:
    raw = {"model": {"vocab": {}, "merges": [["b", "c"], ["\n", "\n"], ["a", "b"], ["\n", "\n\n"], ["c", "d"]]}}
    merges = repair_tokenizer(raw, "gemma3", ())["model"]["merges"]
    assert merges == [["\n", "\n\n"], ["\n", "\n"], ["b", "c"], ["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("flavour", ["smollm", "qwen2", "gemma3", "default"])
def test_unused_rows_are_no_tokens(flavour: str) -> None:
    raw = byte_level([])
    fixed = repair_tokenizer(raw, flavour, {"[PAD9]"})
    assert "[PAD9]" in raw["model"]["vocab"]
    assert "[PAD9]" not in fixed["model"]["vocab"]


def test_an_unknown_flavour_changes_nothing_else() -> None:
    raw = byte_level([["a", "b"]])
    assert repair_tokenizer(raw, "default", ()) == raw


def test_the_configuration_forgets_how_the_file_was_found_and_keeps_the_rest() -> None:
    config = repair_config({"is_local": True, "local_files_only": False, "eos_token": "<e>", "tokenizer_class": "X"})
    assert config == {"eos_token": "<e>", "tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("scaled", ["type", "tensor"])
def test_a_file_that_scales_its_rotary_frequencies_is_refused(tmp_path: Path, scaled: str) -> None:
    """transformers reads Llama 3.2's and DeepSeek's files without the scaling, and computes other numbers."""
    for name in ("plain", "scaled"):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
        if name == "scaled" and scaled == "type":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        elif name == "scaled":
            writer.add_tensor("rope_freqs.weight", np.full(2, 8, np.float32))
        else:
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    require_plain_rope(tmp_path / "plain.gguf")
    with pytest.raises(ModelError, match=r"scaled\.gguf scales its rotary frequencies .* models\.engine = 'llamacpp'"):
        require_plain_rope(tmp_path / "scaled.gguf")


def test_the_tokenizer_of_a_file_that_scales_its_rotary_frequencies_is_converted(tmp_path: Path) -> None:
    """llama.cpp computes with the scaling, and needs no weights of ours."""
    tokens = write_scaled_gguf(tmp_path / "scaled.gguf")
    convert_tokenizer(tmp_path / "scaled.gguf", tmp_path)
    read = load_tokenizer(tmp_path)
    assert len(read.vocabulary) == len(tokens)
    assert read.encode("ab") == [tokens.index("ab")]
    assert read.stop_ids == {len(tokens) - 1}
    assert not list(tmp_path.glob("*.safetensors"))


def test_biases_that_the_model_of_transformers_lacks_are_refused(tmp_path: Path) -> None:
    """It would read such a Llama without them; a Qwen2 always has them."""
    file = write_gguf(LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)), tmp_path / "llama.gguf")
    with pytest.raises(ModelError, match=r"llama\.gguf has biases that LlamaForCausalLM lacks .*blk\.0\.attn_q\.bias"):
        gguf_conversion._convert_weights(file, tmp_path / "folder")
    require_known_biases(write_gguf(tiny_model("qwen2"), tmp_path / "qwen2.gguf"), tiny_model("qwen2"))


def test_a_file_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would make them at random."""
    model = copy.deepcopy(tiny_model("llama"))
    model.config.num_hidden_layers += 1
    file = write_gguf(model, tmp_path / "short.gguf")
    with pytest.raises(ModelError, match=r"short\.gguf has no weights that fit model\.layers\.3\."):
        gguf_conversion._convert_weights(file, tmp_path / "folder")
