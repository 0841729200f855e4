"""Bounded, deterministic, and the right entries stay."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.vocab.ngram_table import ENTRY, NgramTable

WRITES = st.lists(st.tuples(st.integers(0, 2**64 - 1) | st.integers(0, 30), st.integers(0, 99)), max_size=200)


@given(WRITES)
def test_below_capacity_it_is_a_dict(writes: list[tuple[int, int]]) -> None:
    table, expected = NgramTable(1000), {}
    for key, target in writes:
        assert table.add(key, target) == (key not in expected)
        expected[key] = target
    assert len(table) == len(expected)
    assert {key: table.use(key) for key in expected} == expected
    assert dict(zip(table.entries()["key"].tolist(), table.entries()["target"].tolist(), strict=True)) == expected


@given(writes=WRITES, capacity=st.integers(1, 40))
def test_it_never_grows_beyond_its_capacity_and_equal_histories_give_equal_arrays(
    writes: list[tuple[int, int]], capacity: int
) -> None:
    tables = [NgramTable(capacity), NgramTable(capacity)]
    for key, target in writes:
        for table in tables:
            table.add(key, target)
            assert len(table) <= capacity
            assert table.use(key) == target
    np.testing.assert_array_equal(tables[0].entries(), tables[1].entries())


def test_what_is_used_often_stays() -> None:
    table = NgramTable(3)
    for key in (1, 1, 1, 2, 3, 4):
        table.add(key, 0)
    assert table.entries()["key"].tolist() == [1, 3, 4]


def test_an_entry_takes_24_bytes() -> None:
    assert ENTRY.itemsize == 24
