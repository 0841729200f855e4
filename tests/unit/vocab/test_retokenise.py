"""Text kept in step: exact bytes, and the same ids however it arrives."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.errors import VocabularyError
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.vocab.retokenise import MAX_SEGMENT, TailTokeniser, tokenise_bytes
from tests.unit.vocab.texts import DATA, TEXTS

COMPLETE = ["small", "large", "sentencepiece"]
PROMPT = [1, 2, 3]


@pytest.mark.parametrize("name", COMPLETE)
@given(data=DATA)
def test_ids_spell_exactly_the_bytes(tokenizers: dict[str, HfTokenizer], name: str, data: bytes) -> None:
    tokenizer = tokenizers[name]
    ids = tokenise_bytes(tokenizer, data)
    assert tokenizer.vocabulary.spell(ids) == data
    assert tokenizer.vocabulary.special_ids.isdisjoint(ids)


@pytest.mark.parametrize("name", COMPLETE)
@given(text=TEXTS)
def test_a_text_without_endless_words_gets_the_tokenizers_own_ids(
    tokenizers: dict[str, HfTokenizer], name: str, text: str
) -> None:
    tokenizer = tokenizers[name]
    own = tokenizer.encode(text)
    keeps_bytes = tokenizer.vocabulary.spell(own) == text.encode()
    if keeps_bytes and max(map(len, tokenizer.vocabulary.boundary.split(text))) <= MAX_SEGMENT:
        assert tokenise_bytes(tokenizer, text.encode()) == own


@pytest.mark.parametrize("name", COMPLETE)
@given(data=DATA, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_a_text_that_grows_gets_the_ids_of_the_whole(
    tokenizers: dict[str, HfTokenizer], name: str, data: bytes, cuts: list[int]
) -> None:
    tokenizer = tokenizers[name]
    tail = TailTokeniser(tokenizer, PROMPT)
    cut_offsets = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(cut_offsets):
        tail.append(data[start:end])
        whole = TailTokeniser(tokenizer, PROMPT)
        whole.append(data[:end])
        assert (tail.ids, tail.pending) == (whole.ids, whole.pending)
    tail.end()
    assert tail.ids == PROMPT + tokenise_bytes(tokenizer, data)


def test_a_text_that_goes_on_has_the_ids_of_white_space_before_a_word(large: HfTokenizer) -> None:
    """GPT-2's pre-tokenizer leaves the last line break to the word; before white space alone it joins them."""
    before, tail = b"he doesn't care!\n\n", TailTokeniser(large, ())
    tail.append(before)
    assert large.vocabulary.spell(tail.ids) == before
    assert large.encode(f"{before.decode()}The river")[: len(tail.ids)] == tail.ids
    assert tokenise_bytes(large, before) == large.encode(before.decode()) != tail.ids


@given(data=DATA, cut=st.integers(0, 400))
def test_the_ids_said_to_be_unchanged_are_and_the_next_one_is_not(
    tokenizers: dict[str, HfTokenizer], data: bytes, cut: int
) -> None:
    tail = TailTokeniser(tokenizers["large"], PROMPT)
    tail.append(data[:cut])
    before = list(tail.ids)
    unchanged = tail.append(data[cut:])
    assert tail.ids[:unchanged] == before[:unchanged]
    assert unchanged == len(before) or tail.ids[unchanged : unchanged + 1] != before[unchanged : unchanged + 1]


def test_ids_that_changed_when_a_text_ended_inside_a_character_are_not_said_to_be_unchanged(large: HfTokenizer) -> None:
    tail = TailTokeniser(large, PROMPT)
    tail.append(b"he doesn't care!\n\n")
    tail.append("\U0001f600".encode()[:3])
    before = list(tail.ids)
    unchanged = tail.end()
    assert before[unchanged - 1 : unchanged + 1] != tail.ids[unchanged - 1 : unchanged + 1]
    assert tail.ids[:unchanged] == before[:unchanged]


def test_the_beginning_of_a_character_waits_for_its_end(small: HfTokenizer) -> None:
    tail = TailTokeniser(small, PROMPT)
    assert tail.append("\U0001f600".encode()[:3]) == 3
    assert (tail.ids, tail.pending) == (PROMPT, "\U0001f600".encode()[:3])
    tail.append("\U0001f600".encode()[3:])
    assert (small.vocabulary.spell(tail.ids[3:]), tail.pending) == ("\U0001f600".encode(), b"")


def test_text_that_the_tokenizer_would_normalise_keeps_its_bytes(large: HfTokenizer) -> None:
    decomposed = "cafe\u0301".encode()
    assert large.vocabulary.spell(large.encode("cafe\u0301")) != decomposed
    assert large.vocabulary.spell(tokenise_bytes(large, decomposed)) == decomposed


def test_a_continuation_gets_no_space_before_its_first_word(tokenizers: dict[str, HfTokenizer]) -> None:
    for name in ("sentencepiece", "unigram"):
        vocabulary = tokenizers[name].vocabulary
        assert vocabulary.spell(tokenizers[name].encode("the river")) == b"the river"
        assert vocabulary.spell(tokenise_bytes(tokenizers[name], b"the river")) == b"the river"


def test_a_byte_without_any_token_is_refused(tokenizers: dict[str, HfTokenizer]) -> None:
    with pytest.raises(VocabularyError, match="0xff"):
        tokenise_bytes(tokenizers["unigram"], b"\xff")


def test_a_word_without_end_costs_the_same_for_every_piece(large: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the whole word read again each time, 2,000 pieces would mean 2e7 tokenised characters."""
    encode, sizes = large.encode, list[int]()
    monkeypatch.setattr(large, "encode", lambda text: sizes.append(len(text)) or encode(text))
    monkeypatch.setattr(large, "encode_batch", lambda texts: [large.encode(each) for each in texts])
    tail = TailTokeniser(large, [])
    for _ in range(2000):
        tail.append(b"x" * 10)
    assert 20_000 <= sum(sizes) <= 2000 * (MAX_SEGMENT + 10)
    assert large.vocabulary.spell(tail.ids) == b"x" * 20_000
