"""Common boundaries of two tokenisations, against a plain loop over bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.vocab.boundary_alignment import align_boundaries

LENGTHS = st.lists(st.integers(1, 4), max_size=20)


def ends(lengths: list[int]) -> list[int]:
    return [sum(lengths[: index + 1]) for index in range(len(lengths))]


def covered(parts: list[int], wholes: list[int]) -> list[list[int]]:
    """By definition: [whole, first part, end] where two or more parts fill one whole."""
    covers = []
    starts_of_parts = [0, *ends(parts)]
    for whole, end in enumerate(ends(wholes)):
        start = end - wholes[whole]
        if start in starts_of_parts and end in starts_of_parts:
            first, last = starts_of_parts.index(start), starts_of_parts.index(end)
            if last - first >= 2:
                covers.append([whole, first, last])
    return covers


@given(LENGTHS, LENGTHS)
def test_positions_merges_and_splits_are_those_of_the_definition(draft: list[int], target: list[int]) -> None:
    met = align_boundaries(np.array(draft, np.int64), np.array(target, np.int64))
    draft_starts = [0, *ends(draft)]
    expected = [
        (position, draft_starts.index(end - target[position]))
        for position, end in enumerate(ends(target))
        if end - target[position] in draft_starts
    ]
    assert list(zip(met.target_P.tolist(), met.draft_P.tolist(), strict=True)) == expected
    assert met.merges_M3.tolist() == covered(draft, target)
    assert met.splits_S3.tolist() == covered(target, draft)


def test_a_token_without_bytes_at_the_end_follows_all_draft_tokens() -> None:
    met = align_boundaries(np.array([2, 1]), np.array([3, 0]))
    assert met.target_P.tolist() == [0, 1]
    assert met.draft_P.tolist() == [0, 2]
    assert met.merges_M3.tolist() == [[0, 0, 2]]
