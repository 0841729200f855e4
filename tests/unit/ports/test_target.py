"""Prompt and answer together may fill the context to its last id, and no further."""

import pytest

from omnidraft.errors import RequestError
from omnidraft.ports import ids_needed


def test_a_context_can_be_filled_to_its_last_id() -> None:
    assert ids_needed([1, 2, 3], 5, 8) == 8


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [([], "the prompt is empty"), ([1, 2, 3, 4], "is 8 tokens. .* has 4 tokens, and 5 more for the answer")],
)
def test_what_does_not_fit_is_refused_with_all_three_numbers(prompt_ids: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ids_needed(prompt_ids, 5, 8)
