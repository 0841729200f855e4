"""The drafter reads the end of a text that its context cannot hold, from a safe boundary, at twice the reading."""

import pytest

from omnidraft.decode.drafting.drafter_context import SlidingWindow
from omnidraft.testing.toy_models import ToyTokenizer

PIECES = [b"", b"", *[bytes([byte]) for byte in b"abcdefgh .\n"], b"ab", b" a", b"bc"]
TOKENIZER = ToyTokenizer(PIECES, {"bos": 0, "eos": 1})
BOS = 0
A, SPACE = PIECES.index(b"a"), PIECES.index(b" ")


def visible_parts(limit: int, ids: list[int]) -> list[list[int]]:
    window = SlidingWindow(TOKENIZER.vocabulary, limit)
    return [list(window.visible(ids[:length])) for length in range(1, len(ids) + 1)]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 16, 100, 1000])
@pytest.mark.parametrize("front", [[], [BOS]], ids=["plain", "bos"])
def test_what_is_read_is_the_end_of_the_text_and_leaves_room_to_draft(limit, front):
    ids = front + [A + number % 8 for number in range(5 * limit)]
    for length, read in enumerate(visible_parts(limit, ids), 1):
        kept = front if limit > 2 and len(read) < length else []
        assert read == kept + ids[length - len(read) + len(kept) : length]
        assert 1 <= len(read) <= max(limit - min(64, limit // 4), 1)
        assert len(read) == length or len(read) >= min(limit, length) // 4


@pytest.mark.parametrize("limit", [40, 400])
def test_every_id_is_read_about_twice_however_long_the_text(limit):
    texts, num_read, before = visible_parts(limit, [A + number % 8 for number in range(20 * limit)]), 0, []
    for read in texts:
        num_read += 1 if read[:-1] == before else len(read)
        before = read
    assert num_read < 2.5 * len(texts)


def test_it_begins_where_a_word_does_and_a_special_id_parts_words():
    ids = [*TOKENIZER.encode("abc def gh"), SPACE] * 10
    for read in visible_parts(40, ids)[40:]:
        assert TOKENIZER.vocabulary.token_bytes[read[0]][:1] == b" "
    parted = ([A] * 9 + [1]) * 10
    assert all(read[0] == 1 or read[1:2] != [1] for read in visible_parts(40, parted)[40:])


def test_a_text_that_became_shorter_is_read_from_where_it_fits():
    window = SlidingWindow(TOKENIZER.vocabulary, 8)
    window.visible([A] * 40)
    assert window.visible([A] * 5) == [A] * 5
    assert 0 < len(window.visible([A] * 20)) <= 6


@pytest.mark.parametrize("front", [[], [BOS]], ids=["plain", "bos"])
def test_a_text_may_be_read_from_near_its_end_on(front):
    window, ids = SlidingWindow(TOKENIZER.vocabulary, 1000), [*front, *[A + number % 8 for number in range(200)]]
    window.skip(ids, 20)
    read = window.visible(ids)
    assert 15 <= len(read) - len(front) <= 20
    assert read == front + ids[len(front) - len(read) :]
    window.skip(ids, 100)
    assert window.visible(ids) == read
    assert window.visible([*ids, A, A]) == [*read, A, A]


def test_of_a_text_that_ends_soon_nothing_is_skipped():
    window, ids = SlidingWindow(TOKENIZER.vocabulary, 1000), [A] * 20
    window.skip(ids, 64)
    assert window.visible(ids) == ids
