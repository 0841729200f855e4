"""A `longrope` model rotates texts that are longer than its first context otherwise, from their first id on. What a
request may grow to decides, before its first pass."""

import copy
from functools import lru_cache

import pytest
import torch
from transformers import PreTrainedModel

from omnidraft.errors import ContextExceeded, ContractError
from omnidraft.models.hf.drafter import TorchDrafter
from omnidraft.models.hf.target import TransformersTarget
from omnidraft.models.hf.trainable_drafter import TransformersTrainable
from omnidraft.models.kv_session import PassSegment
from omnidraft.models.native.drafter import NativeDrafter
from omnidraft.models.native.target import NativeTarget
from omnidraft.ports import DraftTree, Mode
from tests.models.families import make_model
from tests.unit.models.drafted_trees import chain, scores_by_partition
from tests.unit.models.tiny import PASSES, text, whole_pass

FIRST, LIMIT = 64, 256
OURS, TRANSFORMERS, EXPERTS = "our kernels", "transformers", "Phi-3.5-MoE"
PATHS = (OURS, TRANSFORMERS, EXPERTS)
MODES: tuple[Mode, ...] = ("fast", "reproducible")
CLOSE = {"atol": 2e-3, "rtol": 2e-3}
LONG, SHORT = text(100, seed=1), text(FIRST, seed=2)


@lru_cache
def model(path: str) -> PreTrainedModel:
    return make_model(EXPERTS if path == EXPERTS else "Phi-4-mini").float().eval()


@lru_cache
def target(path: str) -> NativeTarget | TransformersTarget:
    own = copy.deepcopy(model(path))
    if path == OURS:
        return NativeTarget(own, name=path, precision="float32")
    return TransformersTarget(own, PASSES, name=path, precision="float32")


@lru_cache
def expected(path: str, *, is_long: bool) -> torch.Tensor:
    return whole_pass(model(path), LONG if is_long else SHORT)


def test_both_kinds_of_texts_differ_by_more_than_rounding():
    for path in PATHS:
        beginning = whole_pass(model(path), LONG[:FIRST])
        assert (beginning - expected(path, is_long=True)[:FIRST]).abs().max() > 100 * CLOSE["atol"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", PATHS)
def test_texts_of_both_kinds_in_the_same_passes_are_those_of_transformers(path: str, mode: Mode):
    """One is long by its prompt, one grows long behind it, and one fills the first context to its last id."""
    lengths = ((LONG, 70, 30), (LONG, 40, 60), (SHORT, 40, 24))
    texts = [(ids, target(path).open(ids[:prompt], answer, mode)) for ids, prompt, answer in lengths]
    for num_ids in (9, 20):
        target(path).forward([], [(session, num_ids) for _, session in texts])
    while waiting := [(ids, session) for ids, session in texts if session.num_unread]:
        target(path).forward([], [(session, session.num_unread) for _, session in waiting])
    while texts:
        trees = [(session, chain(ids[session.num_kept : session.num_kept + 3])) for ids, session in texts]
        for (ids, session), (_, tree), scores in zip(texts, trees, target(path).forward(trees), strict=True):
            start = session.num_kept
            whole = expected(path, is_long=ids is LONG)[start : start + len(tree)]
            torch.testing.assert_close(scores, whole, **CLOSE)
            session.keep(range(len(tree)))
        texts = [(ids, session) for ids, session in texts if session.num_kept < len(ids)]


@pytest.mark.parametrize("path", PATHS)
def test_no_draft_changes_a_bit_of_a_text_that_grows_long(path: str):
    alone, drafted = (
        scores_by_partition(target(path), LONG[:40], LONG[40:75], sizes) for sizes in ([1] * 36, [3] * 12)
    )
    assert torch.equal(alone, drafted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", PATHS)
def test_keys_serve_texts_of_their_own_kind_alone(path: str, mode: Mode):
    source = target(path).open(LONG[:60], 40, mode)
    source.score(DraftTree.empty(LONG[59]))
    short, long = (target(path).open(LONG[:60], answer, mode) for answer in (4, 5))
    assert target(path).reuse(short, source, 59) == 0
    assert target(path).reuse(long, source, 59) >= 56
    after_short = whole_pass(model(path), LONG[:60])[-1]
    for session, whole in ((short, after_short), (long, expected(path, is_long=True)[59])):
        torch.testing.assert_close(session.score(DraftTree.empty(LONG[59]))[0], whole, **CLOSE)


@pytest.mark.parametrize("path", PATHS)
def test_a_text_may_fill_the_whole_context_and_no_more(path: str):
    assert (target(path).first_context, target(path).context_limit) == (FIRST, LIMIT)
    target(path).open(text(LIMIT - 4), 4, "fast")
    with pytest.raises(ContextExceeded):
        target(path).open(text(LIMIT - 4), 5, "fast")


def test_a_text_that_was_opened_as_a_short_one_does_not_grow_long():
    """Its positions would be those of long texts."""
    own = target(OURS)._model
    backend = own.open()
    own.forward([PassSegment(backend, 0, None, SHORT, 1)])
    with pytest.raises(ContractError):
        own.forward([PassSegment(backend, FIRST, None, [5], 1)])


def test_drafters_read_learn_and_draft_within_the_first_context():
    own = [copy.deepcopy(model(OURS)) for _ in range(3)]
    drafters = (NativeDrafter(own[0], "float32"), TorchDrafter(own[1]), TransformersTrainable(own[2]))
    assert [each.context_limit for each in drafters] == [FIRST] * 3
