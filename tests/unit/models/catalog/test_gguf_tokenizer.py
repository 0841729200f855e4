"""A GGUF file's tokenizer reads texts as its makers' does: markers by their ids, ends, beginnings and templates too."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_conversion import convert_tokenizer
from omnidraft.models.hf.tokenizer import load_tokenizer
from tests.tiny_gguf import write_tokenizer_gguf, write_vocabulary, written

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, DEFINED, UNUSED, BYTE = (
    gguf.TokenType.NORMAL,
    gguf.TokenType.UNKNOWN,
    gguf.TokenType.CONTROL,
    gguf.TokenType.USER_DEFINED,
    gguf.TokenType.UNUSED,
    gguf.TokenType.BYTE,
)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MORE = {"ab": NORMAL, "12": NORMAL, "[PAD9]": UNUSED, "<|end|>": CONTROL, "<think>": DEFINED, "<|start|>": CONTROL}


def byte_level(folder: Path, pre: str, **more: Any) -> Any:
    """A tokenizer with tokens of every kind, behind the letters."""
    file = folder / "byte-level.gguf"
    tokens = [*LETTERS, *MORE]
    types = [NORMAL] * len(LETTERS) + [*MORE.values()]
    write_vocabulary(file, "llama", pre, tokens, types, [("1", "2"), ("a", "b")], **more)
    convert_tokenizer(file, folder)
    return AutoTokenizer.from_pretrained(folder)


def sentencepiece(folder: Path, tokens: dict[str, tuple[int, float]], architecture: str = "llama", **more: Any) -> Any:
    """A tokenizer of tokens with a kind and a score each, of another model than Llama's for Gemma 4."""
    writer = gguf.GGUFWriter(folder / "sentencepiece.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    writer.add_tokenizer_model("gemma4" if architecture == "gemma4" else "llama")
    writer.add_token_list(list(tokens))
    writer.add_token_types([kind for kind, _ in tokens.values()])
    writer.add_token_scores([score for _, score in tokens.values()])
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    written(writer, folder / "sentencepiece.gguf")
    convert_tokenizer(folder / "sentencepiece.gguf", folder)
    return AutoTokenizer.from_pretrained(folder)


WORDS = {
    "<unk>": (UNKNOWN, 0.0), "<s>": (CONTROL, 0.0), "</s>": (CONTROL, 0.0), "<0x21>": (BYTE, 0.0),
    "<0xC3>": (BYTE, 0.0), "<0xA9>": (BYTE, 0.0), SPACE: (NORMAL, -9.0), "a": (NORMAL, -9.0), "b": (NORMAL, -9.0),
    SPACE + "a": (NORMAL, -1.0),
    "ab": (NORMAL, -2.0), "<tool>": (DEFINED, -1000.0), "  ": (DEFINED, -1000.0), "   ": (DEFINED, -1000.0),
}  # fmt: skip


def pieces(tokenizer: Any, text: str) -> list[str]:
    found: list[str] = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
    return found


def test_markers_are_found_by_their_ids_and_unused_rows_are_no_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "qwen2")
    assert pieces(tokenizer, "ab<think>ab<|end|>[PAD9]")[:4] == ["ab", "<think>", "ab", "<|end|>"]
    assert "[PAD9]" not in pieces(tokenizer, "[PAD9]")
    assert len(load_tokenizer(tmp_path).vocabulary) == len(LETTERS) + len(MORE)
    assert tokenizer.encode("<think>", add_special_tokens=False) == [len(LETTERS) + 4]


def test_digits_stand_alone_or_in_threes_as_the_file_says(tmp_path: Path) -> None:
    for name, expected in {"smollm": ["1", "2"], "llama-bpe": ["12"], "qwen2": ["1", "2"]}.items():
        (tmp_path / name).mkdir()
        assert pieces(byte_level(tmp_path / name, name), "12") == expected


def test_qwen_text_is_normalised_before_it_is_cut(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "qwen2")
    assert pieces(tokenizer, "e\u0301") == pieces(tokenizer, "\u00e9")


def test_a_splitting_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"splits texts by 'never-heard-of' \(tokenizer\.ggml\.pre\), which is not known"
    ):
        byte_level(tmp_path, "never-heard-of")


@pytest.mark.parametrize(
    ("pre", "said", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)],
)
def test_a_prompt_begins_as_llama_cpp_has_it(pre: str, said: bool | None, begins: bool, tmp_path: Path) -> None:
    start = len(LETTERS) + len(MORE) - 1
    more = {} if said is None else {"add_bos_token": said}
    tokenizer = byte_level(tmp_path, pre, bos_token_id=start, **more)
    assert (tokenizer.encode("ab")[0] == start) is begins
    assert tokenizer.bos_token == "<|start|>"


def test_a_text_ends_where_the_file_or_one_of_its_control_tokens_says(tmp_path: Path) -> None:
    file, tokens = tmp_path / "x.gguf", ["a", "b", "<|im_end|>", "<own>", "<|endoftext|>", "</s>", "ab"]
    types = [NORMAL, NORMAL, CONTROL, CONTROL, CONTROL, DEFINED, NORMAL]
    write_vocabulary(file, "llama", "qwen2", tokens, types, [("a", "b")], eos_token_id=4, eot_token_id=3)
    convert_tokenizer(file, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [4, 3, 2]


def test_templates_are_kept_by_their_names(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "one").mkdir()
    assert byte_level(tmp_path / "one", "qwen2", chat_template="plain").chat_template == "plain"
    assert byte_level(tmp_path, "qwen2", chat_template=named).chat_template == {
        "default": "plain",
        "tool_use": "with tools",
    }


def test_sentencepiece_merges_by_score_falls_back_to_bytes_and_begins_words_with_a_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, WORDS)
    assert pieces(tokenizer, "ab") == [SPACE + "a", "b"]
    assert pieces(tokenizer, "b!\u00e9") == [SPACE, "b", "<0x21>", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("b")[0] == 1
    assert tokenizer.decode(tokenizer.encode("ab <tool>b", add_special_tokens=False)).replace(" ", "") == "ab<tool>b"
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_sentencepiece_without_the_space_before_a_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, WORDS, add_space_prefix=False, add_bos_token=False)
    assert pieces(tokenizer, "ab") == ["ab"]
    assert tokenizer.encode("b") == [8]


def test_gemma_merges_by_id_and_takes_the_longest_run_of_spaces_first(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, WORDS, "gemma3", add_space_prefix=False)
    assert pieces(tokenizer, "    a") == [SPACE * 3, SPACE + "a"]


def test_gemma_4_merges_as_its_file_says_and_within_a_whole_text(tmp_path: Path) -> None:
    merges = [f"{SPACE} a", "a b"]
    tokenizer = sentencepiece(tmp_path, WORDS, "gemma4", add_space_prefix=False, token_merges=merges, bos_token_id=1)
    assert pieces(tokenizer, "ab ab!") == ["ab", SPACE + "a", "b", "<0x21>"]
    assert tokenizer.encode("b") == [1, 8]


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "t5")
    writer.add_tensor("token_embd.weight", np.zeros((1, 4), np.float32))
    writer.add_tokenizer_model("t5")
    writer.add_token_list(["a"])
    writer.add_token_types([1])
    written(writer, tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"^x\.gguf has a tokenizer of the kind 't5', which cannot be converted"):
        convert_tokenizer(tmp_path / "x.gguf", tmp_path)


def test_the_tokenizer_of_any_architecture_is_converted_alone(tmp_path: Path) -> None:
    """llama.cpp computes, and needs no weights of ours."""
    tokens = write_tokenizer_gguf(tmp_path / "any.gguf", "an-architecture-of-tomorrow")
    convert_tokenizer(tmp_path / "any.gguf", tmp_path)
    read = load_tokenizer(tmp_path)
    assert len(read.vocabulary) == len(tokens)
    assert read.encode("ab") == [tokens.index("ab")]
    assert read.stop_ids == {len(tokens) - 1}
    assert not list(tmp_path.glob("*.safetensors"))
