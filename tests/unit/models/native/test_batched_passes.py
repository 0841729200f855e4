"""No bit of a text on our kernels depends on what else a pass computes: other texts, chunks, or reused keys."""

import copy
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.models.native import model as native_model
from omnidraft.models.native.target import NativeTarget
from omnidraft.ports import DraftTree
from tests.unit.models.drafted_trees import drafted
from tests.unit.models.tiny import text, tiny_model

PRECISIONS = ["float32", "packed16", "int8", "int4"]
PROMPT, ANSWER = text(80, seed=1), text(30, seed=2)


@lru_cache
def target(precision: str) -> NativeTarget:
    return NativeTarget(copy.deepcopy(tiny_model("qwen2")).float(), name="qwen2", precision=precision)


@lru_cache
def alone(precision: str) -> torch.Tensor:
    """Logits after the prompt and each id of the answer, one row a pass. [S, V]"""
    session, rows = target(precision).open(PROMPT[:1], 200, "fast"), []
    for token in [*PROMPT, *ANSWER]:
        rows.append(session.score(DraftTree.empty(token))[0])
        session.keep((0,))
    return torch.stack(rows[len(PROMPT) - 1 :])


@pytest.fixture(autouse=True, scope="module")
def _keys_that_often_need_more_room():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_model, "_CAPACITY_STEP", 16)
        yield


def opened(data, precision: str):
    """A session that is to read the prompt, part of which it may have of another text that went on otherwise."""
    session, shared = target(precision).open(PROMPT, 150, "fast"), data.draw(st.sampled_from([0, 1, 8, 9, 64, 79]))
    if shared:
        source = target(precision).open([*PROMPT[:shared], *text(40, seed=5)], 9, "fast")
        source.score(DraftTree.empty(3))
        assert target(precision).reuse(session, source, shared) == shared
        source.keep((0,))
        source.close()
    return session


def others(data, precision: str) -> list[tuple]:
    """Texts with trees of up to 64 nodes, and what these score alone."""
    found = []
    for number in range(data.draw(st.integers(0, 7))):
        other = target(precision).open(text(data.draw(st.integers(1, 100)), seed=number), 70, "fast")
        other.score(DraftTree.empty(4))
        size = data.draw(st.sampled_from([1, 2, 30, 64]))
        parents = [0, *(data.draw(st.integers(0, node)) for node in range(size - 1))]
        tree = drafted(text(size, seed=number), parents)
        found.append((other, tree, other.score(tree)))
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=12)
@given(data=st.data())
def test_any_mixture_of_trees_and_chunks_of_prompts_behind_keys_of_others(precision, data):
    """Passes of more rows than the kernels take at once are split."""
    session, beside = opened(data, precision), others(data, precision)
    batch, expected = [each[:2] for each in beside], [each[2] for each in beside]
    while session.num_unread:
        chunk = min(data.draw(st.sampled_from([1, 7, 64, 80])), session.num_unread)
        logits = target(precision).forward(batch, [(session, chunk)])
        assert all(torch.equal(got, whole) for got, whole in zip(logits, expected, strict=True))
        if chunk == 1:  # and the rest of it at once
            target(precision).forward([], [(session, session.num_unread)] if session.num_unread else [])
    at, start = data.draw(st.integers(0, len(batch))), 0
    for size in (10, 1, 19):
        path = drafted([PROMPT[-1], *ANSWER][start : start + size], (0, *range(size - 1)))
        logits = target(precision).forward([*batch[:at], (session, path), *batch[at:]])
        assert torch.equal(logits.pop(at), alone(precision)[start : start + size])
        assert all(torch.equal(got, whole) for got, whole in zip(logits, expected, strict=True))
        session.keep(range(size))
        start += size


def test_keys_of_emitted_ids_serve_the_next_turn():
    source = target("int8").open(PROMPT, 100, "fast")
    for token in (PROMPT[-1], *ANSWER[:2]):
        source.score(DraftTree.empty(token))
        source.keep((0,))
    turn = [*PROMPT, *ANSWER]
    session = target("int8").open(turn, 20, "reproducible")
    assert target("int8").reuse(session, source, len(turn)) == len(PROMPT) + 2
    assert torch.equal(session.score(DraftTree.empty(ANSWER[-1]))[0], alone("int8")[len(ANSWER)])
