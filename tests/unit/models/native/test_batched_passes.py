"""No bit of a text on our kernels depends on what else a pass computes: other texts, chunks, or reused keys."""

import copy
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.models.native import model as native_model
from omnidraft.models.native.target import LlamaTarget
from omnidraft.ports import DraftTree
from tests.unit.models.drafted_trees import BUSHY, drafted
from tests.unit.models.tiny import text, tiny_model

PRECISIONS = ["float32", "packed16", "int8", "int4"]
PROMPT, ANSWER = text(80, seed=1), text(30, seed=2)
NUM_OTHERS = 7


@lru_cache
def target(precision: str) -> LlamaTarget:
    return LlamaTarget(copy.deepcopy(tiny_model("qwen2")).float(), name="qwen2", precision=precision)


@lru_cache
def alone(precision: str) -> torch.Tensor:
    """Logits after the prompt and each id of the answer, one row a pass. [S, V]"""
    session, rows = target(precision).open(PROMPT[:1], 200, "fast"), []
    for token in [*PROMPT, *ANSWER]:
        rows.append(session.score(DraftTree.empty(token))[0])
        session.keep((0,))
    return torch.stack(rows[len(PROMPT) - 1 :])


def opened(precision: str, chunk: int | None = None, beside=()):
    """A session that read the prompt in chunks of this size, beside trees of others."""
    session = target(precision).open(PROMPT, 100, "fast")
    while session.num_unread:
        size = min(chunk or session.num_unread, session.num_unread)
        target(precision).forward(beside, [(session, size)])
    return session


def others(precision: str) -> list[tuple]:
    """Texts of several lengths, ready for trees of several shapes."""
    found = []
    for number in range(NUM_OTHERS):
        prompt = text(1 + 23 * number, seed=number + 10)
        session = target(precision).open(prompt, 60, "fast")
        session.score(DraftTree.empty(prompt[-1]))
        size = (1, 4, len(BUSHY))[number % 3]
        found.append((session, drafted(text(size, seed=number), BUSHY[:size])))
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_beside_seven_other_texts(precision):
    session, beside = opened(precision), others(precision)
    for index, token in enumerate([PROMPT[-1], *ANSWER]):
        at = index % (NUM_OTHERS + 1)
        batch = [*beside[:at], (session, DraftTree.empty(token)), *beside[at:]]
        assert torch.equal(target(precision).forward(batch)[at][0], alone(precision)[index])
        session.keep((0,))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("has_others", [False, True])
def test_a_prompt_read_in_chunks(precision, chunk, has_others):
    session = opened(precision, chunk, others(precision) if has_others else ())
    assert torch.equal(session.score(DraftTree.empty(PROMPT[-1]))[0], alone(precision)[0])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_shared", [1, 7, 8, 9, 64, 79])
def test_reused_keys(monkeypatch, precision, num_shared):
    """The source goes on with another text, of which nothing may be seen, and has fewer slots."""
    monkeypatch.setattr(native_model, "_CAPACITY_STEP", 16)
    prefix = PROMPT[:num_shared]
    source = target(precision).open([*prefix, *text(40, seed=5)], 9, "fast")
    source.score(DraftTree.empty(3))
    session = target(precision).open(PROMPT, 150, "fast")
    assert target(precision).reuse(session, source, num_shared) == num_shared
    source.keep((0,))
    source.close()
    assert (session.num_kept, session.num_unread) == (num_shared, len(PROMPT) - 1 - num_shared)
    for index, token in enumerate([PROMPT[-1], *ANSWER]):
        assert torch.equal(session.score(DraftTree.empty(token))[0], alone(precision)[index])
        session.keep((0,))


def test_keys_of_emitted_ids_serve_the_next_turn():
    source = opened("int8")
    source.score(DraftTree.empty(PROMPT[-1]))
    source.keep((0,))
    turn = [*PROMPT, *ANSWER]
    session = target("int8").open(turn, 20, "reproducible")
    assert target("int8").reuse(session, source, len(turn)) == len(PROMPT)
    assert torch.equal(session.score(DraftTree.empty(ANSWER[-1]))[0], alone("int8")[len(ANSWER)])


@settings(max_examples=30)
@given(data=st.data())
def test_any_mixture_of_trees_and_prompts(data):
    """Passes of more rows than the kernels take at once are split; a tree of 64 nodes among them."""
    beside, prompts, session = [], [], opened("packed16")
    for number in range(data.draw(st.integers(0, 8))):
        ids = text(data.draw(st.integers(2, 100)), seed=number)
        other = target("packed16").open(ids, 70, "fast")
        if data.draw(st.booleans()):
            prompts.append((other, data.draw(st.integers(1, other.num_unread)), ids))
            continue
        other.score(DraftTree.empty(4))
        size = data.draw(st.sampled_from([1, 2, 30, 64]))
        parents = [0, *(data.draw(st.integers(0, node)) for node in range(size - 1))]
        beside.append((other, drafted(text(size, seed=number), parents)))
    at = data.draw(st.integers(0, len(beside)))
    path = drafted([PROMPT[-1], *ANSWER[:9]], (0, *range(9)))
    expected = [other.score(tree) for other, tree in beside]
    logits = target("packed16").forward([*beside[:at], (session, path), *beside[at:]], [each[:2] for each in prompts])
    assert torch.equal(logits.pop(at), alone("packed16")[:10])
    assert all(torch.equal(got, whole) for got, whole in zip(logits, expected, strict=True))
    for other, _, ids in prompts:
        whole = target("packed16").open(ids, 70, "fast").score(DraftTree.empty(4))
        assert torch.equal(other.score(DraftTree.empty(4)), whole)


def test_texts_share_the_scratch_memory_of_their_passes():
    beside = others("int8")
    for _ in range(3):
        target("int8").forward(beside)
    assert len(target("int8")._model._scratch._free) == 1
