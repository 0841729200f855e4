"""The suffix index finds what a search through all texts finds, and survives arrays that are not its own."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnidraft.errors import SnapshotCorrupt
from omnidraft.memory.match import MAX_OCCURRENCES
from omnidraft.memory.suffix_index import MAX_LENGTH, SuffixIndex

TOKEN = st.integers(0, 3) | st.integers(0, 2**24 - 1)
TEXT = st.lists(TOKEN, max_size=40)
TEXTS = st.lists(TEXT, max_size=8)


def occurrences(texts: Sequence[Sequence[int]], ending: Sequence[int]) -> list[int | None]:
    """What follows each occurrence of the ending; None where the text ends."""
    size = len(ending)
    return [
        text[at + size] if at + size < len(text) else None
        for text in texts
        for at in range(len(text) - size + 1)
        if list(text[at : at + size]) == list(ending)
    ]


def longest_ending(texts: Sequence[Sequence[int]], context: Sequence[int], max_length: int) -> list[int]:
    for size in range(min(len(context), max_length), 0, -1):
        if occurrences(texts, context[-size:]):
            return list(context[-size:])
    return []


@given(TEXTS, TEXT, st.integers(1, 70))
@example([[1, 2, 3], [2, 3]], [0, 1, 2], 64)
@example([[7] * 200], [7] * 100, 64)
def test_it_finds_the_longest_ending_with_the_counts_of_all_that_followed(
    texts: list[list[int]], context: list[int], max_length: int
) -> None:
    match = SuffixIndex.build(texts).longest_match(context, max_length)
    ending = longest_ending(texts, context, min(max_length, MAX_LENGTH))
    if not ending:
        assert match is None
        return
    assert match is not None
    followed = occurrences(texts, ending)
    assert (match.length, match.count) == (len(ending), len(followed))
    if match.count <= MAX_OCCURRENCES:
        counts = Counter(token for token in followed if token is not None)
        assert dict(match.continuations(100)) == counts
        assert [count for _, count in match.continuations(100)] == sorted(counts.values(), reverse=True)


@given(TEXTS, TEXT, TEXT)
def test_a_match_goes_on_with_every_id_that_followed_and_with_no_other(
    texts: list[list[int]], context: list[int], further: list[int]
) -> None:
    match = SuffixIndex.build(texts).longest_match(context)
    ending = longest_ending(texts, context, MAX_LENGTH)
    for token in further:
        if match is None:
            return
        ending = [*ending, token]
        match, followed = match.extend(token), occurrences(texts, ending)
        assert (0 if match is None else match.count) == len(followed)
        assert match is None or match.length == len(ending)


def test_of_many_occurrences_a_spread_sample_stands_for_all() -> None:
    texts = [[1, 2, 10 + (number % 4 == 0)] for number in range(4000)]
    match = SuffixIndex.build(texts).longest_match([1, 2])
    assert match is not None
    assert match.count == 4000
    counts = dict(match.continuations(2))
    assert counts[10] == pytest.approx(3000, rel=0.1)
    assert sum(counts.values()) == pytest.approx(4000, rel=0.01)


def test_the_newest_of_equally_frequent_continuations_comes_first() -> None:
    match = SuffixIndex.build([[1, 2, 5], [1, 2, 6], [1, 2, 7]]).longest_match([1, 2])
    assert match is not None
    assert match.continuations(3) == [(7, 1), (6, 1), (5, 1)]


@given(TEXTS)
def test_equal_texts_give_equal_bytes_and_arrays_come_back_as_they_were(texts: list[list[int]]) -> None:
    arrays = SuffixIndex.build(texts).to_arrays()
    for name, values in SuffixIndex.build([np.array(text, np.uint32) for text in texts]).to_arrays().items():
        assert values.tobytes() == arrays[name].tobytes()
    again = SuffixIndex.from_arrays(arrays)
    assert all(again.to_arrays()[name] is values for name, values in arrays.items())
    assert sum(values.nbytes for values in arrays.values()) <= 8 * sum(len(text) + 1 for text in texts)


@given(TEXTS)
@example([[5] * 70])
@example([[5] * 1000])
def test_positions_are_sorted_by_the_last_ids_before_them_and_then_by_age(texts: list[list[int]]) -> None:
    arrays = SuffixIndex.build(texts).to_arrays()
    ids, order = arrays["ids"].tolist(), arrays["order"].tolist()
    keys = [(ids[max(position - MAX_LENGTH, 0) : position][::-1], position) for position in order]
    assert keys == sorted(keys)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.lists(st.integers(0, 2**32 - 1), max_size=30), TEXT, TEXT)
def test_hostile_arrays_neither_crash_nor_loop(
    ids: list[int], order: list[int], context: list[int], further: list[int]
) -> None:
    index = SuffixIndex.from_arrays({"ids": np.array(ids, np.uint32), "order": np.array(order[: len(ids)], np.uint32)})
    for ending in (context, ids, [*ids, *context]):
        match = index.longest_match(ending)
        for token in further:
            if match is not None:
                assert len(match.continuations(3)) <= 3
                match = match.extend(token)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"ids": np.zeros(3, np.uint32)},
        {"ids": np.zeros(3, np.uint32), "order": np.zeros(3, np.int64)},
        {"ids": np.zeros((3, 1), np.uint32), "order": np.zeros(3, np.uint32)},
        {"ids": np.zeros(6, np.uint32)[::2], "order": np.zeros(3, np.uint32)},
        {"ids": np.zeros(3, np.uint32), "order": np.zeros(4, np.uint32)},
    ],
)
def test_what_is_no_index_is_refused(arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(SnapshotCorrupt, match="suffix memory"):
        SuffixIndex.from_arrays(arrays)


def test_an_empty_memory_matches_nothing() -> None:
    for texts in ([], [[]]):
        assert SuffixIndex.build(texts).longest_match([1, 2, 3]) is None
    assert SuffixIndex.build([[1, 2]]).longest_match([]) is None
