"""The plain Llama forward says what transformers' own says, as TorchScript and as it is."""

import logging
from copy import deepcopy
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from omnidraft.models import llama_drafter
from omnidraft.models.llama_drafter import LlamaDrafter, is_supported
from tests.unit.models.tiny import CONFIGS, text, tiny_model, whole_pass


@lru_cache(maxsize=1)
def model() -> PreTrainedModel:
    """With embeddings that bfloat16 can hold, as the drafter keeps them."""
    made = deepcopy(tiny_model("llama"))
    made.model.embed_tokens.weight.copy_(made.model.embed_tokens.weight.bfloat16())
    return made


def assert_same(logits: torch.Tensor, ids: list[int]) -> None:
    torch.testing.assert_close(logits, whole_pass(model(), ids)[-1], atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def drafter() -> LlamaDrafter:
    return LlamaDrafter(model(), "float32")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_cut_back_and_grown_again_it_says_what_a_whole_pass_says(drafter, data):
    session, ids = drafter.open(), []
    for turn in range(4):
        keep = data.draw(st.integers(0, len(ids)))
        ids = [*ids[:keep], *text(data.draw(st.integers(1, 7)), seed=turn)]
        logits = session.advance(keep, ids[keep:])
    assert_same(logits, ids)


def test_a_text_longer_than_the_first_slots_grows_them(drafter, monkeypatch):
    monkeypatch.setattr(llama_drafter, "_CAPACITY_STEP", 16)
    session, ids = drafter.open(), text(60)
    session.advance(0, ids[:10])
    assert_same(session.advance(10, ids[10:]), ids)


def test_two_sessions_of_one_drafter_do_not_disturb_each_other(drafter):
    one, other, ids = drafter.open(), drafter.open(), text(9)
    one.advance(0, ids)
    other.advance(0, text(9, seed=4))
    assert_same(one.advance(9, [3]), [*ids, 3])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_without_torchscript_it_says_the_same_and_warns(precision, monkeypatch, caplog):
    scripted = LlamaDrafter(model(), precision).open()
    monkeypatch.delattr(torch.jit, "script")
    with caplog.at_level(logging.WARNING):
        plain = LlamaDrafter(model(), precision).open()
    assert "TorchScript" in caplog.text
    ids = text(12)
    for keep, new in ((0, ids), (12, [5]), (13, [6, 7])):
        assert torch.equal(scripted.advance(keep, new), plain.advance(keep, new))


def test_only_llama_models_are_supported():
    assert [name for name in CONFIGS if is_supported(tiny_model(name))] == ["llama"]
