"""The byte table spells what no tokenizer call can; a cut at a safe boundary changes no token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.errors import VocabularyError
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.vocab.tokenizer import ByteTable, boundary_pattern
from tests.unit.vocab.texts import TEXTS


def test_the_lower_of_two_ids_with_the_same_bytes_is_meant() -> None:
    assert ByteTable([b"", b"a", b"a"]).get(b"a") == 1


def test_an_id_of_byte_fallback_is_meant_only_where_there_is_no_other() -> None:
    table = ByteTable([b"", b"a", b"b", b"a"], {1, 2})
    assert (table.get(b"a"), table.get(b"b")) == (3, 2)
    assert table.longest_match(b"ab") == [3, 2]


def test_the_byte_table_has_the_ids_that_the_tokenizer_gives_for_characters(
    tokenizers: dict[str, HfTokenizer],
) -> None:
    tokenizer = tokenizers["sentencepiece"]
    vocabulary = tokenizer.vocabulary
    given_ids = {token for text in ("4 clips. She sold", "a.b, c") for token in tokenizer.encode(text)}
    single = {token for token in given_ids if len(vocabulary.token_bytes[token]) == 1}
    assert single - vocabulary.fallback_ids  # beside which there are bytes by number
    assert {vocabulary.byte_table.get(vocabulary.token_bytes[token]) for token in single} == single


def test_an_id_without_bytes_is_never_found() -> None:
    assert ByteTable([b"", b"a"]).get(b"") is None


def test_longest_match_takes_the_longest_token_at_each_place() -> None:
    assert ByteTable([b"a", b"ab", b"abc", b"c", b"bc"]).longest_match(b"abcabbc") == [2, 1, 4]


def test_bytes_that_no_token_spells_are_refused() -> None:
    with pytest.raises(VocabularyError, match="0xff"):
        ByteTable([b"a"]).longest_match(b"a\xff")


@pytest.mark.parametrize("name", ["small", "large", "sentencepiece"])
@given(text=TEXTS)
def test_both_parts_of_a_cut_text_are_tokenised_as_in_one_piece(
    tokenizers: dict[str, HfTokenizer], name: str, text: str
) -> None:
    tokenizer = tokenizers[name]
    for cut in tokenizer.vocabulary.boundary.finditer(text):
        left, right = text[: cut.start()], text[cut.start() :]
        assert tokenizer.encode(left) + tokenizer.encode(right) == tokenizer.encode(text)


def test_no_cut_where_some_token_reaches_across() -> None:
    assert boundary_pattern([b"a", b" b"]).split("a b") == ["a", " b"]
    assert boundary_pattern([b"a", b"a b"]).split("a b") == ["a b"]


def test_bytes_that_are_no_text_stand_alone() -> None:
    text = b"caf\xc3 x".decode("utf-8", "surrogateescape")
    assert boundary_pattern([b"x"]).split(text) == ["caf", "\udcc3", " x"]


@given(st.binary(max_size=40))
def test_broken_bytes_never_share_a_segment_with_text(data: bytes) -> None:
    for part in boundary_pattern([b"x"]).split(data.decode("utf-8", "surrogateescape")):
        assert len({"\udc80" <= character <= "\udcff" for character in part}) <= 1
