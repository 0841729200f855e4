"""The draft token that is spelled most like a target token."""

import numpy as np
import pytest

from omnidraft import extras
from omnidraft.errors import ExtraMissing
from omnidraft.vocab.alignment import Alignment, PackedLists
from omnidraft.vocab.nearest_tokens import NearestTokens
from omnidraft.vocab.tokenizer import Vocabulary

DRAFT = Vocabulary((b"", b" riv", b" rivers", b"er", b"\xff\xfe"), {}, frozenset({0}))
TARGET = Vocabulary((b"", b" river", b"er", b"\xff\xfe\xfd", b"zzz"), {}, frozenset({0}))
ALIGNMENT = Alignment("toy", PackedLists.of([(), (), (), (2,), ()]), PackedLists.of([(), (1, 3), (3,), (), ()]))
"""Only `er` is a token of both; ` river` is spelled ` riv`, `er`."""


def distance(a: bytes, b: bytes) -> int:
    """Levenshtein's, by its recurrence."""
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))


def test_the_nearest_is_that_of_the_least_edit_distance_in_bytes() -> None:
    nearest = NearestTokens(ALIGNMENT, DRAFT, TARGET).of(np.array([[1, 2], [3, 4]]))
    for target in (1, 3, 4):
        distances = {draft: distance(TARGET.token_bytes[target], DRAFT.token_bytes[draft]) for draft in range(1, 5)}
        assert nearest[target] == min(distances, key=distances.__getitem__)
    assert nearest[1] == 2
    assert nearest[2] == 3


def test_what_has_no_bytes_has_none() -> None:
    assert NearestTokens(ALIGNMENT, DRAFT, TARGET).of(np.array([0]))[0] == ALIGNMENT.num_draft


def test_a_token_that_was_looked_up_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = NearestTokens(ALIGNMENT, DRAFT, TARGET)
    before = nearest.of(np.array([1, 4])).copy()
    monkeypatch.setattr(nearest, "_search", lambda ids: pytest.fail(f"searched {ids} again"))
    assert nearest.of(np.array([1, 2, 4])).tolist() == before.tolist()


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    assert len(NearestTokens(ALIGNMENT, DRAFT, TARGET).of(np.array([99]))) == len(TARGET)


def test_without_its_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match="the loss mined needs the Python package rapidfuzz"):
        NearestTokens(ALIGNMENT, DRAFT, TARGET)
