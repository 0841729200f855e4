"""Every splitting of texts that a GGUF file can name is llama.cpp's.

llama.cpp takes upper and lower case and marks beyond ASCII otherwise than the makers of the splittings by case do.
"""

import ctypes
import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from omnidraft.models.catalog.gguf_file import GgufFile
from omnidraft.models.catalog.gguf_tokenizer import SPLITTINGS, write_tokenizer
from tests.tiny_gguf import write_vocabulary
from tests.unit.models.tiny_llamacpp import require_llamacpp

TEXTS = (
    "Hello, world! don't I'LL we've ...  two  spaces\n\n\tx = y**2  # 12345678\r\n",
    "In 2024, 1,234.56 items; camelCaseXMLHttp /* C */ //x\n'T 's (a+b)/c <b>html</b> `q`",
    "日本語のテキスト、中文字符。한국어 텍스트 русский ЁЖ हिन्दी العربية ١٢٣ ﬁ ①②Ⅷ Ünï",
    " " * 9 + "end \u00a0nbsp \u3000wide!?",
)


@pytest.fixture(scope="module")
def merged() -> dict[str, object]:
    """A vocabulary whose tokens go over every boundary, so that they show where a text was split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    parts = [text[start : start + 4] for text in TEXTS for start in range(len(text) - 3)]
    tokenizer.train_from_iterator(
        parts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    )
    model: dict[str, object] = json.loads(tokenizer.to_str())["model"]
    return model


@pytest.mark.parametrize("name", SPLITTINGS)
def test_texts_are_split_as_llama_cpp_splits_them(name: str, merged: dict, tmp_path: Path) -> None:
    require_llamacpp()
    import llama_cpp

    file = tmp_path / "vocabulary.gguf"
    vocab = merged["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    write_vocabulary(file, "llama", name, tokens, [gguf.TokenType.NORMAL] * len(tokens), merged["merges"])
    write_tokenizer(GgufFile(file), tmp_path)
    mine = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
    is_by_case = any(r"\p{Lu}" in pattern for pattern in SPLITTINGS[name].patterns)
    try:
        for text in TEXTS[:2] if is_by_case else TEXTS:
            encoded, ids = text.encode(), (ctypes.c_int32 * 1000)()
            count = llama_cpp.llama_tokenize(
                llama_cpp.llama_model_get_vocab(model), encoded, len(encoded), ids, 1000, False, False
            )
            assert mine.encode(text, add_special_tokens=False).ids == list(ids[:count]), text
    finally:
        llama_cpp.llama_model_free(model)
