"""Four tiny tokenizers, trained once and loaded through the real adapter."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.vocab.alignment import Alignment, align

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 1984, and he doesn't care!\n\n",
    "def add(a, b):\n    return a + b  # 12 + 30 = 42\n",
    "Where does the water of the river go? Into the sea, of course; the river itself stays.\n",
    "caf\u00e9 na\u00efve \u00fcber stra\u00dfe \u4f60\u597d\uff0c\u4e16\u754c\u3002 "
    "\U0001f600\U0001f680 \u0928\u092e\u0938\u094d\u0924\u0947\n",
] * 4
CHATML = (
    "{% for m in messages %}{% if m['role'] == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(vocab_size: int, *, normalizes: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=CONTROL)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """As converted from Llama and Gemma: a space before the first word, single bytes for what it lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    control = ["<unk>", "<s>", "</s>"]
    words = [word for text in TEXT for word in text.replace("\n", " ").split(" ")]
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, special_tokens=control))
    tokenizer = _with_byte_tokens(tokenizer)
    tokenizer.add_tokens([AddedToken("\u2581\u2581", special=False, normalized=False)])  # as Gemma's runs of spaces
    return tokenizer


def _with_byte_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Behind the control tokens and before all others, as Llama 2 and Gemma have them."""
    plain = json.loads(tokenizer.to_str())
    first = len(plain["added_tokens"])
    vocab = {token: index if index < first else index + 256 for token, index in plain["model"]["vocab"].items()}
    plain["model"]["vocab"] = vocab | {f"<0x{byte:02X}>": first + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(plain))


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path, **settings: str) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    chat = {"chat_template": CHATML, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    large = byte_level(700, normalizes=True)
    large.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return {
        "small": saved(byte_level(330, normalizes=False), root / "small", bos_token="<|im_start|>", **chat),
        "large": saved(large, root / "large", bos_token="<|endoftext|>", **chat),
        "sentencepiece": saved(
            sentencepiece_bpe(), root / "sentencepiece", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        ),
        "unigram": saved(unigram(), root / "unigram", eos_token="</s>", unk_token="<unk>"),
    }


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, HfTokenizer]:
    return {name: HfTokenizer(folder, vocab_size=800) for name, folder in folders.items()}


@pytest.fixture(scope="session", params=["small", "large", "sentencepiece", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, HfTokenizer]) -> HfTokenizer:
    return tokenizers[request.param]


@pytest.fixture(scope="session", params=["small", "large", "sentencepiece"])
def complete(request: pytest.FixtureRequest, tokenizers: dict[str, HfTokenizer]) -> HfTokenizer:
    """A tokenizer that has a token for every byte."""
    return tokenizers[request.param]


@pytest.fixture(scope="session")
def small(tokenizers: dict[str, HfTokenizer]) -> HfTokenizer:
    return tokenizers["small"]


@pytest.fixture(scope="session")
def large(tokenizers: dict[str, HfTokenizer]) -> HfTokenizer:
    return tokenizers["large"]


@pytest.fixture(scope="session")
def alignment(small: HfTokenizer, large: HfTokenizer) -> Alignment:
    return align(small, large)
