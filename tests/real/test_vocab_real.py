"""The four real tokenizers: every id, the alignment's size, and text kept in step."""

import random
import time
import unicodedata
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from omnidraft.demo.answers import recorded
from omnidraft.errors import VocabularyError
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.system import default_home
from omnidraft.vocab.alignment import Alignment, align
from omnidraft.vocab.retokenise import TailTokeniser, tokenise_bytes
from tests.unit.vocab.texts import ODD

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NAMES = ("smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "gemma3-270m")
ROWS = {"smollm2-135m": 49_152, "qwen2.5-coder-1.5b": 151_936, "qwen2.5-coder-0.5b": 151_936, "gemma3-270m": 262_144}
TEXT = (
    "Question: 3 + 14 = 17, isn't it?  \u4f60\u597d\uff0c\u4e16\u754c\u3002\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002"
    " \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 caf\u00e9\n\n"
    "def area(r):\r\n\treturn 3.14159 * r**2  # <td>a</td> <|im_end|>\n" + " " * 37 + "x = {'a': [1, 2]}\n\n\n"
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u043f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627"
    " I'LL don't \u00a0 \u2019s 1234567890 \u00b2 ...!?\n"
)


def loaded(name: str) -> HfTokenizer:
    folder = default_home() / "models" / name
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"{folder} holds no converted model; `omnidraft models pull {name}`")
    return HfTokenizer(folder, vocab_size=ROWS[name])


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest) -> HfTokenizer:
    return loaded(request.param)


@pytest.fixture(scope="module")
def pair() -> tuple[HfTokenizer, HfTokenizer]:
    return loaded("smollm2-135m"), loaded("qwen2.5-coder-1.5b")


@pytest.fixture(scope="module")
def alignment(pair: tuple[HfTokenizer, HfTokenizer]) -> Alignment:
    return align(*pair)


def test_bytes_of_every_id_agree_with_the_tokenizers_own_decoder(tokenizer: HfTokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    (anchor,) = vocabulary.byte_table.longest_match(b"a")
    texts = {index: text for index, spelled in enumerate(vocabulary.token_bytes) if (text := decoded(spelled))}
    decodings = tokenizer._backend.decode_batch([[anchor, index] for index in texts])
    wrong = [index for (index, text), read in zip(texts.items(), decodings, strict=True) if read != "a" + text]
    assert wrong == []
    assert len(texts) > 45_000


def test_every_ids_bytes_are_spelled_again_exactly(tokenizer: HfTokenizer) -> None:
    for spelled in tokenizer.vocabulary.token_bytes:
        assert tokenizer.vocabulary.spell(tokenise_bytes(tokenizer, spelled)) == spelled


def test_encoding_a_tokens_text_gives_its_bytes_unless_it_is_normalised(tokenizer: HfTokenizer) -> None:
    spelled = [data for data in tokenizer.vocabulary.token_bytes if (text := decoded(data)) and is_nfc(text)]
    encoded = tokenizer.encode_batch([data.decode() for data in spelled])
    wrong = [data for data, ids in zip(spelled, encoded, strict=True) if tokenizer.vocabulary.spell(ids) != data]
    assert wrong == []


def test_a_text_gets_the_tokenizers_own_ids(tokenizer: HfTokenizer) -> None:
    text = TEXT * 20
    assert tokenise_bytes(tokenizer, text.encode()) == tokenizer.encode(text)


def test_a_text_that_grows_gets_the_ids_of_the_whole_in_well_under_a_millisecond(tokenizer: HfTokenizer) -> None:
    random.seed(7)
    data = (TEXT * 20 + "e\u0301\ud7fb" + "w" * 1000 + " " * 1000).encode() + b"\xc3 \xe4\xbd" + TEXT.encode()
    tail, spent, start = TailTokeniser(tokenizer, [1]), [], 0
    tail.append(b"")
    while start < len(data):
        end = start + random.randint(1, 12)
        began = time.perf_counter()
        tail.append(data[start:end])
        spent.append(time.perf_counter() - began)
        start = end
    assert tail.ids[1:] == tokenise_bytes(tokenizer, data)
    print(f"\nappend: median {np.median(spent) * 1e6:.0f} us, 99 % {np.quantile(spent, 0.99) * 1e6:.0f} us")
    assert np.median(spent) < 0.5e-3


def test_smollm2_and_qwen_share_what_they_are_known_to_share(
    pair: tuple[HfTokenizer, HfTokenizer], alignment: Alignment
) -> None:
    """39,237 strings are in both vocabularies; three of them are special tokens."""
    by_role = [token for token in pair[0].vocabulary.special_ids if alignment.pieces(token)]
    assert alignment.num_direct - len(by_role) == 39_234
    assert {0, 1, 2} <= set(by_role)


def test_the_demos_recorded_answers_are_of_the_vocabularies_of_today(alignment: Alignment) -> None:
    held_out, learned = recorded(200)
    assert {record.alignment for record in (*held_out, *learned)} == {alignment.fingerprint}


def decoded(spelled: bytes) -> str:
    """The text, or "" when these bytes are none by themselves."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return ""


def is_nfc(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text)


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(data=ODD)
def test_odd_texts_survive_whole_and_token_by_token(tokenizer: HfTokenizer, data: bytes) -> None:
    """Emoji, scripts without spaces, broken UTF-8, runs of spaces, words of 300 letters: the same bytes come back.

    Bytes that no token of a vocabulary has (SmolLM2 lacks 0xF5, which no UTF-8 has either) are refused, not changed.
    """
    if set(data) - _bytes_of(tokenizer):
        with pytest.raises(VocabularyError):
            tokenise_bytes(tokenizer, data)
        return
    ids = tokenise_bytes(tokenizer, data)
    assert tokenizer.vocabulary.spell(ids) == data
    assert tokenizer.vocabulary.special_ids.isdisjoint(ids)
    tail = TailTokeniser(tokenizer, ())
    for token in ids:
        tail.append(tokenizer.vocabulary.spell((token,)))
    assert tokenizer.vocabulary.spell(tail.ids) + tail.pending == data


@lru_cache(maxsize=4)
def _bytes_of(tokenizer: HfTokenizer) -> frozenset[int]:
    """Bytes that some token has."""
    return frozenset(b"".join(tokenizer.vocabulary.token_bytes))
