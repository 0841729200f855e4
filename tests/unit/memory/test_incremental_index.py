"""A growing index finds what a search finds, among the newest occurrences."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from omnidraft.memory.incremental_index import IncrementalIndex
from omnidraft.memory.match import SEPARATOR

IDS = st.lists(st.integers(0, 3), max_size=60)


def longest(ids: list[int], context: list[int]) -> tuple[int, list[int]]:
    """The length of the longest ending that stands before another id, and the positions behind it."""
    for length in range(min(len(context), 64), 1, -1):
        ends = [end for end in range(length, len(ids)) if ids[end - length : end] == context[-length:]]
        if ends:
            return length, ends
    return 0, []


@given(IDS, IDS)
@example([1] * 60, [1] * 60)
def test_it_finds_the_longest_ending_of_any_context(ids: list[int], context: list[int]) -> None:
    index = IncrementalIndex()
    index.append(ids)
    match, (length, ends) = index.longest_match(context), longest(ids, context)
    if not length:
        assert match is None
        return
    assert match is not None
    assert (match.length, match.count) == (length, len(ends))
    assert sum(count for _, count in match.continuations(9)) == len(ends)
    assert {token for token, _ in match.continuations(9)} == {ids[end] for end in ends}


@given(IDS)
def test_a_text_that_grows_finds_where_its_own_end_stood_before(ids: list[int]) -> None:
    index, text = IncrementalIndex(), []
    for token in ids:
        index.append([token])
        text.append(token)
        match = index.longest_match(text)
        assert (match.length if match else 0) == longest(text, text)[0]
    assert list(index.ids) == ids


def test_many_ids_are_found_again_however_often_the_tables_grew() -> None:
    ids = np.random.default_rng(0).integers(0, 500, 5000).tolist()
    index = IncrementalIndex()
    index.append(ids)
    for end in range(20, 4000, 97):
        match = index.longest_match(ids[:end])
        assert match is not None
        assert match.length == min(end, 64)
        assert match.continuations(1) == [(ids[end], 1)]


def test_nothing_is_found_across_a_separator() -> None:
    index = IncrementalIndex()
    index.append([1, 2, 3, SEPARATOR, 4, 5, SEPARATOR])
    match = index.longest_match([1, 2, 3])
    assert match is not None
    assert match.continuations(3) == []
    assert index.longest_match([3, 4]) is None
