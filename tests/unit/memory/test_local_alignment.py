"""A local alignment finds where the text goes on, across changes, as the textbook's table does."""

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from omnidraft.memory.local_alignment import MAX_SCORE, AlignedPosition, LocalAlignment

IDS = st.lists(st.integers(0, 4), max_size=50)


def table_best(ids: Sequence[int]) -> list[AlignedPosition]:
    """The best positions by the whole table of Smith and Waterman, cell by cell."""
    row = [0]
    for end, token in enumerate(ids):
        above, row = row, [0]
        for position in range(1, end + 1):
            matched = above[position - 1] + (1 if ids[position - 1] == token else -1)
            row.append(min(max(0, matched, above[position] - 1, row[-1] - 1), MAX_SCORE))
        row.append(0)  # here ends the text itself
    best: list[AlignedPosition] = []
    for position in sorted(range(len(ids)), key=lambda position: (-row[position], -position)):
        if row[position] and ids[position] not in {ids[other.position] for other in best}:
            best.append(AlignedPosition(position, row[position], ids[position - 1] == ids[-1]))
    return best


def aligned(ids: Sequence[int], max_ids: int = 8192) -> LocalAlignment:
    alignment = LocalAlignment(max_ids)
    for token in ids:
        alignment.append([token])
    return alignment


@given(IDS)
@example([1] * 50)
@example([*range(40), 99, *range(40)])
def test_it_scores_every_position_as_the_whole_table_does(ids: list[int]) -> None:
    assert list(aligned(ids).best(99)) == table_best(ids)


@given(st.lists(IDS, max_size=4))
def test_ids_that_come_together_count_as_if_they_came_one_by_one(parts: list[list[int]]) -> None:
    ids = [token for part in parts for token in part]
    alignment = LocalAlignment()
    for part in parts:
        alignment.append(part)
    assert list(alignment.best(99)) == list(aligned(ids).best(99))


CODE = list(range(100, 130))


def test_a_long_prompt_is_aligned_by_its_end_alone() -> None:
    prompt = [*CODE, *range(500, 900), *CODE[:20]]
    alignment = LocalAlignment()
    alignment.append(prompt)
    assert next(alignment.best(1)) == AlignedPosition(20, 20, is_equal=True)


@given(st.lists(IDS, max_size=12), st.sampled_from([80, 100, 133]))
def test_positions_are_those_of_the_whole_text_when_old_ids_are_dropped(parts: list[list[int]], max_ids: int) -> None:
    alignment, ids = LocalAlignment(max_ids), [*range(1000, 1150), *CODE]
    alignment.append(ids)
    for part in parts:
        alignment.append(part)
        ids += part
    for position, _, is_equal in alignment.best(99):
        assert len(ids) - max_ids <= position < len(ids)
        assert is_equal == (ids[position - 1] == ids[-1])


def test_what_was_dropped_is_not_found_and_what_is_held_is() -> None:
    alignment = LocalAlignment(200)
    alignment.append([*CODE, *range(1000, 1200)])
    alignment.append(CODE[:8])
    assert list(alignment.best(1)) == []
    alignment.append([*range(2000, 2050), *range(2000, 2008)])
    assert next(alignment.best(1)) == AlignedPosition(246, 8, is_equal=True)


def test_it_holds_memory_for_its_limit_only() -> None:
    alignment = LocalAlignment(256)
    for part in np.random.default_rng(0).integers(0, 50, (40, 100)).tolist():
        alignment.append(part)
        assert len(alignment) <= 256
