"""The size and depth of a JSON text, against what a parser finds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.decode.sampling.input_limits import JsonLimits
from omnidraft.errors import RequestError

VALUES = st.recursive(
    st.none() | st.integers() | st.text('",[]{}\\\\a:', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('",[]{}\\\\a', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def size(value: Any) -> int:
    """Values, and 1 for each empty list."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else max(1, len(inner)) + sum(map(size, inner))


@given(VALUES)
def test_brackets_and_commas_of_texts_do_not_count(value):
    text = json.dumps(value).encode()
    JsonLimits(max(1, size(value)), depth(value)).check(text, "it")
    if depth(value):
        with pytest.raises(RequestError, match=f"it: nested {depth(value)} deep, at most {depth(value) - 1}"):
            JsonLimits(10_000, depth(value) - 1).check(text, "it")
    if size(value) > 1:
        with pytest.raises(RequestError, match="it: more than"):
            JsonLimits(size(value) - 1, 10_000).check(text, "it")
