"""Drive a drafter's session with random calls: after any cuts and branches it gives the logits of the plain text."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from omnidraft.ports import DraftSession

Expected = Callable[[list[int]], torch.Tensor | np.ndarray]
"""A function that returns the logits after a text, from a fresh session."""


def drive(
    session: DraftSession,
    data: st.DataObject,
    expected: Expected,
    assert_same: Callable[[np.ndarray, Any], None],
    *,
    vocab_size: int,
) -> None:
    """Run three turns of one `prefill_or_extend` and up to two `branch` calls, and compare every row of logits."""
    some_ids = st.lists(st.integers(0, vocab_size - 1), max_size=5)
    held: list[int] = []
    branched: list[list[int]] = []
    for _ in range(3):
        held = _next_text(data, held, branched, some_ids, session, expected, assert_same)
        branched = []
        for ids in data.draw(st.lists(some_ids.filter(bool), max_size=2)):
            parents = [data.draw(st.integers(-1, len(branched) - 1)) for _ in ids]
            texts = [
                [*(held if parent < 0 else branched[parent]), token] for parent, token in zip(parents, ids, strict=True)
            ]
            for row, text in zip(session.branch(ids, parents), texts, strict=True):
                assert_same(row, expected(text))
            branched += texts


def _next_text(
    data: st.DataObject,
    held: Sequence[int],
    branched: Sequence[list[int]],
    some_ids: st.SearchStrategy[list[int]],
    session: DraftSession,
    expected: Expected,
    assert_same: Callable[[np.ndarray, Any], None],
) -> list[int]:
    """Advance along a branch or from anywhere in the text."""
    if branched and data.draw(st.booleans()):
        keep, start = len(held), data.draw(st.sampled_from(branched))
    else:
        keep = data.draw(st.integers(0, len(held)))
        start = list(held[:keep])
    text = [*start, *data.draw(some_ids.filter(bool) if len(start) == keep else some_ids)]
    assert_same(session.prefill_or_extend(keep, text[keep:]), expected(text))
    return text
