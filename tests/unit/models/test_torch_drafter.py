"""The drafter's session: cut back and grown again, it says what a whole pass says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.models import torch_drafter
from omnidraft.models.torch_drafter import TorchDrafter, load_drafter
from tests.unit.models.tiny import CONFIGS, VOCAB_SIZE, text, tiny_model, whole_pass

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def assert_same(logits: torch.Tensor, name: str, ids: list[int]) -> None:
    torch.testing.assert_close(logits, whole_pass(tiny_model(name), ids)[-1], **CLOSE)


@pytest.mark.parametrize("name", CONFIGS)
def test_advance_says_what_a_whole_pass_says(name):
    session, ids = TorchDrafter(tiny_model(name)).open(), text(12)
    assert_same(session.advance(0, ids), name, ids)
    assert_same(session.advance(12, [5]), name, [*ids, 5])
    assert_same(session.advance(13, [6, 7]), name, [*ids, 5, 6, 7])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_cut_back_and_grown_again_it_is_as_if_fed_from_scratch(name, data):
    session, ids = TorchDrafter(tiny_model(name)).open(), []
    for turn in range(4):
        keep = data.draw(st.integers(0, len(ids)))
        ids = [*ids[:keep], *text(data.draw(st.integers(1, 7)), seed=turn)]
        logits = session.advance(keep, ids[keep:])
    assert_same(logits, name, ids)


def test_a_text_longer_than_the_first_slots_grows_them():
    session, ids = TorchDrafter(tiny_model("llama")).open(), text(200)
    session._slots = torch_drafter.KvSlots(3, 16)
    session.advance(0, ids[:10])
    assert_same(session.advance(10, ids[10:]), "llama", ids)
    assert session._slots.capacity == 512


def test_two_sessions_of_one_drafter_do_not_disturb_each_other():
    drafter, ids = TorchDrafter(tiny_model("qwen2")), text(9)
    one, other = drafter.open(), drafter.open()
    one.advance(0, ids)
    other.advance(0, text(9, seed=4))
    assert_same(one.advance(9, [3]), "qwen2", [*ids, 3])


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_drafter_is_loaded_from_its_folder(folder):
    ids = text(6)
    drafter = load_drafter(folder, "float32", None, "full")
    assert (drafter.vocab_size, drafter.context_limit) == (VOCAB_SIZE, 256)
    expected = whole_pass(tiny_model("llama"), ids)[-1]
    got = drafter.open().advance(0, ids)
    assert (got - expected).std() / expected.std() < 0.02  # a serving drafter may round its embedding to bfloat16


def test_a_snapshots_tensors_go_on_top(folder):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {each: parameter.detach().clone() for each, parameter in tiny_model("llama").named_parameters()}
    tensors[name] = tensors[name] * 0
    plain = load_drafter(folder, "float32", None, "full").open().advance(0, text(6))
    changed = load_drafter(folder, "float32", tensors, "full").open().advance(0, text(6))
    assert not torch.allclose(plain, changed, atol=1e-2)
