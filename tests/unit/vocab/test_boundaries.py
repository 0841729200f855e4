"""A cut changes no token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.vocab.boundaries import boundary_pattern
from tests.unit.vocab.texts import TEXTS


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
