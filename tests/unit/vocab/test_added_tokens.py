"""Added tokens have the ids that transformers gives them, for every kind of tokenizer that we take, in texts and in
chats; what is special among them stays text in what a user writes."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from omnidraft.errors import ModelError
from omnidraft.models.hf.tokenizer import HfTokenizer
from tests.unit.vocab.conftest import CONTROL, byte_level, saved, sentencepiece_bpe, unigram

ADDED = [
    AddedToken("<|box|>", special=True, normalized=False),
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("<|User|>", special=False, normalized=False),
    AddedToken("<|turn|>", special=True, normalized=False),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False, lstrip=True, rstrip=True),
    AddedToken("<word>", special=False, normalized=False, single_word=True),
    AddedToken("<shape>", special=False, normalized=True),
    AddedToken("<|last|>", special=True, normalized=False),
]
"""Special ones before, between and behind the others, as in Qwen 2.5 and DeepSeek V3."""
MARKED_TEXTS = [
    *(token.content for token in ADDED if not token.special),
    "<tool_call>\n{}</tool_call> the river<think></think>goes <|User|> on",
    "  <|User|>Where?<|User|> \n </think> \n a <word> b <THINK><Shape><shape>",
    " \u4f60\u597d<think>\ufb01 caf\u00e9</think>\n\n<tool_call><tool_call>",
    "the water of the river",
    "",
]
TEMPLATE = (
    "<|turn|>{% for m in messages %}<|User|>{{ m['content'] }}<|last|>\n<|box|> {% endfor %}"
    "{% if tools %}<tool_call>{{ tools[0]['function']['name'] }}</tool_call>{% endif %}<think>\n\n</think>\n"
)
CHAT = [{"role": "user", "content": "Where <think>\nhm</think> goes <tool_call>\nit"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def changed(tokenizer: Tokenizer, change: Callable[[dict], object]) -> Tokenizer:
    plain = json.loads(tokenizer.to_str())
    change(plain)
    return Tokenizer.from_str(json.dumps(plain))


def normalized(normalizer: normalizers.Normalizer, make: Callable[[], Tokenizer] = unigram) -> Tokenizer:
    tokenizer = make()
    tokenizer.normalizer = normalizer
    return tokenizer


def plain_bytes() -> Tokenizer:
    return byte_level(330, normalizes=False)


def with_prefix_space() -> Tokenizer:
    tokenizer = plain_bytes()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def with_first_and_last() -> Tokenizer:
    tokenizer = plain_bytes()
    ids = [(text, tokenizer.token_to_id(text)) for text in CONTROL[1:]]
    template = f"{CONTROL[1]} $A {CONTROL[2]}"
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


def whole_words() -> Tokenizer:
    """As Llama 3: a word that the model knows is one token, whatever its merges."""
    return changed(plain_bytes(), lambda plain: plain["model"].update(ignore_merges=True))


def with_byte_fallback() -> Tokenizer:
    def add_bytes(plain: dict) -> None:
        plain["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
        plain["model"]["byte_fallback"] = True

    tokenizer = changed(unigram(), add_bytes)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def with_metaspace_first() -> Tokenizer:
    tokenizer = unigram()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def characters() -> Tokenizer:
    """One token a character, joined by nothing but Fuse."""
    text = "".join([*MARKED_TEXTS, *(message["content"] for message in CHAT), TEMPLATE, json.dumps(TOOLS)])
    vocab = {character: number for number, character in enumerate(dict.fromkeys(["<unk>", *text]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def with_another_space() -> Tokenizer:
    """A marker of the space that is not SentencePiece's."""
    tokenizer = changed(
        unigram(),
        lambda plain: plain["model"].update(
            vocab=[[text.replace("\u2581", "_"), score] for text, score in plain["model"]["vocab"]]
        ),
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace("_"), decoders.Metaspace("_")
    return tokenizer


def with_pieces_twice() -> Tokenizer:
    def add(plain: dict) -> None:
        pieces = plain["model"]["vocab"]
        pieces += [*([text, score - 1] for text, score in pieces[20:24]), ["", -9.0], ["", -9.0]]

    return changed(unigram(), add)


def with_duplicates() -> Tokenizer:
    """Some added tokens are in the model as well, and two of its tokens spell the same."""

    def add(plain: dict) -> None:
        first = len(plain["model"]["vocab"])
        plain["model"]["vocab"] |= {
            text: first + number for number, text in enumerate(["<think>", "<|turn|>", "<0x0a>"])
        }

    return changed(sentencepiece_bpe(), add)


def with_holes() -> Tokenizer:
    """The ids of the model have gaps, and a special token is behind one."""

    def add(plain: dict) -> None:
        plain["model"]["vocab"] |= {"<|turn|>": 400, "hole": 420}

    return changed(plain_bytes(), add)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": plain_bytes,
    "prefix space": with_prefix_space,
    "NFC": lambda: byte_level(330, normalizes=True),
    "NFKC": lambda: normalized(normalizers.NFKC(), plain_bytes),
    "lower case": lambda: normalized(normalizers.Lowercase(), plain_bytes),
    "strip": lambda: normalized(normalizers.Strip(), plain_bytes),
    "first and last tokens": with_first_and_last,
    "whole words": whole_words,
    "holes": with_holes,
    "duplicates": with_duplicates,
    "prepend": sentencepiece_bpe,
    "Unigram": unigram,
    "Unigram, pieces twice": with_pieces_twice,
    "Unigram, another space": with_another_space,
    "characters": characters,
    "Unigram, NFKC": lambda: normalized(normalizers.NFKC()),
    "Unigram, byte fallback": with_byte_fallback,
    "Unigram, Metaspace first": with_metaspace_first,
}


@pytest.fixture(scope="module", params=[*KINDS, "vocab.json", "tekken.json"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kind")
    if request.param in KINDS:
        tokenizer = KINDS[request.param]()
        tokenizer.add_tokens(ADDED)
        return saved(tokenizer, root, eos_token="<|last|>", chat_template=TEMPLATE)
    (root / "chat_template.jinja").write_text(TEMPLATE)
    return {"vocab.json": as_vocabulary_and_merges, "tekken.json": as_tekken}[request.param](root)


def as_vocabulary_and_merges(root: Path) -> Path:
    """As Qwen 2 was published: no tokenizer.json, and the added tokens in the configuration."""
    model = json.loads(plain_bytes().to_str())["model"]
    (root / "vocab.json").write_text(json.dumps(model["vocab"]))
    (root / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n")
    first = len(model["vocab"])
    added = {
        str(first + number): {
            "content": token.content, "special": token.special, "normalized": token.normalized,
            "lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word,
        }
        for number, token in enumerate(ADDED)
    }  # fmt: skip
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|last|>", "added_tokens_decoder": added}
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    return root


def as_tekken(root: Path) -> Path:
    """As Mistral publishes its models since 2025."""
    special = ["<unk>", "<s>", "</s>", "<pad>", *(token.content for token in ADDED if token.special)]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+", "num_vocab_tokens": 256,
        "default_vocab_size": 256 + len(special) + 2, "default_num_special_tokens": len(special) + 2, "version": "v11",
    }  # fmt: skip
    vocab = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    ranks = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)]
    (root / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": ranks}))
    return root


def transformers_tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if (folder / "tekken.json").exists():  # what mistral-common adds, and transformers without it does not
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


def test_ids_of_texts_are_those_of_transformers(folder: Path) -> None:
    theirs, ours = transformers_tokenizer(folder), HfTokenizer(folder)
    last = theirs("").input_ids[len(ours.prompt_ids("")) :]
    for text in MARKED_TEXTS:
        assert [*ours.prompt_ids(text), *last] == theirs(text).input_ids, text


def test_ids_spell_what_transformers_decodes(folder: Path) -> None:
    theirs, ours = transformers_tokenizer(folder), HfTokenizer(folder)
    before = ours.encode("a")
    for text in MARKED_TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        if ours.vocabulary.special_ids.isdisjoint(ids):
            spelled = ours.vocabulary.spell(ids).decode("utf-8", "replace")
            assert theirs.decode([*before, *ids]) == theirs.decode(before) + spelled


def test_a_token_for_whole_words_is_none_inside_a_word(tmp_path: Path) -> None:
    tokenizer = plain_bytes()
    tokenizer.add_tokens(ADDED)
    theirs, ours = AutoTokenizer.from_pretrained(saved(tokenizer, tmp_path)), HfTokenizer(tmp_path)
    assert ours.encode("a<word>b <word>") == theirs("a<word>b <word>").input_ids


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
def test_ids_of_chats_are_those_of_transformers(folder: Path, tools: list[dict]) -> None:
    theirs, ours = transformers_tokenizer(folder), HfTokenizer(folder)
    expected = theirs.apply_chat_template(CHAT, tools=tools or None, add_generation_prompt=True, return_dict=False)
    assert ours.chat_prompt_ids(CHAT, tools) == expected


def test_every_added_token_spells_itself_in_a_text_or_is_out_of_its_reach(folder: Path) -> None:
    theirs, ours = transformers_tokenizer(folder), HfTokenizer(folder)
    before, spelled = ours.encode("a"), ours.vocabulary.token_bytes
    for index, token in theirs.added_tokens_decoder.items():
        ids = ours.encode(token.content)
        if token.special:
            ids += ours.prompt_ids(token.content)[len(ours.prompt_ids("")) :]
            assert index not in ids or token.content == "<unk>"
        else:
            assert ids == [index]
            assert theirs.decode([*before, index]) == theirs.decode(before) + spelled[index].decode()


def test_special_tokens_of_mistrals_files_have_their_roles(tmp_path: Path) -> None:
    ours = HfTokenizer(as_tekken(tmp_path))
    assert ours.vocabulary.roles == {"unk": 0, "bos": 1, "eos": 2, "end_of_text": 2, "pad": 3}
    assert ours.prompt_ids("a") == [1, *ours.encode("a")]


def test_mistrals_files_of_2024_name_no_special_tokens_and_need_its_library(tmp_path: Path) -> None:
    as_tekken(tmp_path)
    older = json.loads((tmp_path / "tekken.json").read_text())
    del older["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(older))
    with pytest.raises(ModelError, match="pip install mistral-common"):
        HfTokenizer(tmp_path)


@pytest.mark.parametrize("is_whole_word", [False, True])
def test_no_merge_and_no_whole_word_of_a_text_is_a_control_token(tmp_path: Path, is_whole_word: bool) -> None:
    """SentencePiece's tables make merges of all their pieces, control pieces too."""

    def add(plain: dict) -> None:
        plain["model"]["vocab"] |= {"</": 330, "s>": 331, "</s>": 332, "</s></s>": 333}
        plain["model"]["ignore_merges"] = is_whole_word
        if not is_whole_word:
            plain["model"]["merges"] += [["<", "/"], ["s", ">"], ["</", "s>"], ["</s>", "</s>"]]

    tokenizer = changed(plain_bytes(), add)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["</s>"])
    ours = HfTokenizer(saved(tokenizer, tmp_path, eos_token="</s>"))
    assert 332 not in ours.encode("</s>") + ours.prompt_ids("the </s></s>")
    assert ours.vocabulary.spell(ours.encode("</s>")) == b"</s>"
