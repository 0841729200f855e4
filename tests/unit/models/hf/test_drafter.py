"""The drafter through transformers gives the logits of a whole pass; loading chooses it where there is no compiler."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.models.hf import slot_model
from omnidraft.models.hf.drafter import TorchDrafter, load_drafter
from omnidraft.models.native import library
from omnidraft.models.native.drafter import NativeDrafter
from omnidraft.models.precision import automatic
from omnidraft.system import default_home
from tests.unit.models.session_driver import drive
from tests.unit.models.tiny import CONFIGS, VOCAB_SIZE, text, tiny_model, whole_pass


def assert_close(got: np.ndarray, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(got), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=10)
@given(data=st.data())
def test_any_calls_say_what_a_whole_pass_over_the_text_says(name, data):
    model = tiny_model(name)
    drive(TorchDrafter(model).open(), data, lambda ids: whole_pass(model, ids)[-1], assert_close, vocab_size=VOCAB_SIZE)


def test_a_text_longer_than_the_first_slots_grows_them(monkeypatch):
    monkeypatch.setattr(slot_model, "_CAPACITY_STEP", 16)
    session, ids = TorchDrafter(tiny_model("llama")).open(), text(200)
    session.prefill_or_extend(0, ids[:10])
    assert_close(session.prefill_or_extend(10, ids[10:]), whole_pass(tiny_model("llama"), ids)[-1])


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_drafter_is_loaded_from_its_folder(folder):
    ids = text(6)
    drafter = load_drafter(folder, "float32", None, "full")
    assert (drafter.vocab_size, drafter.context_limit) == (VOCAB_SIZE, 256)
    assert_close(drafter.open().prefill_or_extend(0, ids), whole_pass(tiny_model("llama"), ids)[-1])


def test_a_snapshots_tensors_go_on_top(folder):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {each: parameter.detach().clone() for each, parameter in tiny_model("llama").named_parameters()}
    tensors[name] = tensors[name] * 0
    plain = load_drafter(folder, "float32", None, "full").open().prefill_or_extend(0, text(6))
    changed = load_drafter(folder, "float32", tensors, "full").open().prefill_or_extend(0, text(6))
    assert not np.allclose(plain, changed, atol=1e-2)


@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_without_a_compiler_transformers_drafts_and_the_log_says_what_to_install(
    folder, tmp_path, monkeypatch, caplog, precision
):
    shared = default_home() / "probes"  # what torch survives is known; no kernel is compiled yet
    (tmp_path / "probes").symlink_to(shared)
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        drafter = load_drafter(folder, precision, None, "full")
    assert isinstance(drafter, TorchDrafter)
    [warning] = [record.getMessage() for record in caplog.records if record.name == "omnidraft.models.hf.drafter"]
    assert "no-such-compiler" in warning
    assert "apt-get install g++" in warning
    got, expected = drafter.open().prefill_or_extend(0, text(6)), whole_pass(tiny_model("llama"), text(6))[-1]
    most = 0.05 if precision == "auto" and automatic() == "bfloat16" else 0.02
    assert (torch.from_numpy(got) - expected).std() / expected.std() < most


def test_where_the_kernels_work_the_automatic_choice_is_native(folder):
    library.load()
    assert isinstance(load_drafter(folder, "auto", None, "full"), NativeDrafter)
