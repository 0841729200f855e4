"""Branches are followed, moved and cleared as ports.DraftSession says; the toy is the reference and is tested too."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.models.kv_session import BranchingSession, PassSegment
from omnidraft.testing.toy_models import ToyDrafter, ToyTable
from tests.unit.models.session_driver import drive

VOCAB_SIZE = 3  # few enough for texts to run along branches by chance
TABLE = ToyTable.random(VOCAB_SIZE, seed=1, order=6, num_states=997)


class IdRows:
    """Implements kv_session.KvModel and KvBackend, for one text, with ids for keys."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.num_computed = 0

    def open(self, **options: object) -> "IdRows":
        return self

    def forward_arrays(self, segments: Sequence[PassSegment]) -> list[np.ndarray]:
        return [self._compute(each.length, each.parents, each.ids) for each in segments]

    def _compute(self, length: int, parents: Sequence[int] | None, ids: Sequence[int]) -> np.ndarray:
        if parents is None:
            self._put(length, ids)
            return TABLE.logits([self.slots[slot] for slot in range(length + len(ids))])[None].numpy()
        self._put(length + len(parents) - len(ids), ids)
        text = [self.slots[slot] for slot in range(length)]
        behind: list[list[int]] = []
        for node, parent in enumerate(parents):
            behind.append([*(behind[parent] if parent >= 0 else text), self.slots[length + node]])
        return np.stack([TABLE.logits(each) for each in behind[-len(ids) :]])

    def move(self, sources: Sequence[int], start: int) -> None:
        for number, source in enumerate(sources):
            assert start + number <= source
            self.slots[start + number] = self.slots[source]

    def _put(self, start: int, ids: Sequence[int]) -> None:
        self.slots.update(enumerate(ids, start))
        self.num_computed += len(ids)


def assert_equal(got: np.ndarray, expected: torch.Tensor) -> None:
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    "open_session", [ToyDrafter(TABLE).open, lambda: BranchingSession(IdRows())], ids=["toy", "rows"]
)
@given(data=st.data())
def test_any_calls_say_what_the_text_says(open_session, data):
    drive(open_session(), data, TABLE.logits, assert_equal, vocab_size=VOCAB_SIZE)


def test_a_text_along_branches_computes_only_what_nobody_branched():
    rows = IdRows()
    session = BranchingSession(rows)
    session.prefill_or_extend(0, [0, 1])
    session.branch([2, 1, 0], [-1, -1, 1])
    session.prefill_or_extend(2, [1, 0, 2])
    assert rows.num_computed == 2 + 3 + 1


def test_a_text_that_ends_on_a_branch_computes_nothing():
    rows = IdRows()
    session = BranchingSession(rows)
    session.prefill_or_extend(0, [0, 1])
    branched = session.branch([2, 1, 0], [-1, -1, 1])
    assert np.array_equal(session.prefill_or_extend(2, [1, 0]), branched[2])
    assert rows.num_computed == 2 + 3
