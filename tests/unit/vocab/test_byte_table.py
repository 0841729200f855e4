"""Bytes that no tokenizer call can spell."""

import pytest

from omnidraft.errors import VocabularyError
from omnidraft.vocab.byte_table import ByteTable


def test_the_lower_of_two_ids_with_the_same_bytes_is_meant() -> None:
    assert ByteTable([b"", b"a", b"a"]).get(b"a") == 1


def test_an_id_without_bytes_is_never_found() -> None:
    assert ByteTable([b"", b"a"]).get(b"") is None


def test_longest_match_takes_the_longest_token_at_each_place() -> None:
    assert ByteTable([b"a", b"ab", b"abc", b"c", b"bc"]).longest_match(b"abcabbc") == [2, 1, 4]


def test_bytes_that_no_token_spells_are_refused() -> None:
    with pytest.raises(VocabularyError, match="0xff"):
        ByteTable([b"a"]).longest_match(b"a\xff")
