"""The native target gives the logits of transformers, and the same bits however a text was drafted."""

import copy
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from omnidraft.errors import ModeRefused
from omnidraft.models.hf.target import load_target
from omnidraft.models.native import model as native_model
from omnidraft.models.native.model import NativeModel
from omnidraft.models.native.target import NativeTarget
from omnidraft.ports import DraftTree
from tests.unit.models.native.packed_levels import rounds_inputs
from tests.unit.models.tiny import SHAPE, VOCAB_SIZE, text, tiny_model, whole_pass

PRECISIONS = ["packed16", "int8", "int4"]


def max_error(precision: str) -> float:
    """How far logits may be from those of the same bfloat16 weights in float32, of their spread."""
    return {"packed16": 0.03 if rounds_inputs() else 1e-3, "int8": 0.1, "int4": 0.8}[precision]


@lru_cache
def exact(name: str) -> PreTrainedModel:
    """bfloat16 weights, in float32; biases as wild as the rest."""
    model = copy.deepcopy(tiny_model(name))
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            parameter.data.normal_(generator=generator)
    return model.to(torch.bfloat16).float()


@lru_cache
def target(name: str, precision: str = "packed16") -> NativeTarget:
    return NativeTarget(exact(name), name=name, precision=precision)


def one_by_one(name: str, precision: str, ids: list[int]) -> torch.Tensor:
    """Logits after every id, each scored alone. [S, V]"""
    session, rows = target(name, precision).open(ids[:1], len(ids), "reproducible"), []
    for token in ids:
        rows.append(session.score(DraftTree.empty(token))[0])
        session.keep((0,))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_are_those_of_transformers_within_rounding(name, precision):
    ids = text(90)
    expected, got = whole_pass(exact(name), ids), one_by_one(name, precision, ids)
    assert (got - expected).std() / expected.std() < max_error(precision)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=8)
@given(data=st.data())
def test_no_tree_changes_a_bit(name, precision, data):
    """Prefilled ids, then trees whose kept path runs between rejected siblings."""
    ids = text(40, seed=3)
    expected = one_by_one(name, precision, ids)
    at = data.draw(st.integers(1, 20))
    session = target(name, precision).open(ids[:at], 60, data.draw(st.sampled_from(["fast", "reproducible"])))
    at -= 1
    while at < len(ids) - 1:
        tree, path = data.draw(trees_around(ids[at:]))
        rows = session.score(tree)
        assert torch.equal(rows[list(path)], expected[at : at + len(path)])
        session.keep(path)
        at += len(path)


@st.composite
def trees_around(draw, ids: list[int]):
    """A tree whose root is the first id, and the nodes in it that hold a front of the ids."""
    tokens, parents, path = [ids[0]], [0], [0]
    for _ in range(draw(st.integers(0, 11))):
        goes_on = draw(st.booleans()) and len(path) < len(ids)
        parents.append(path[-1] if goes_on else draw(st.integers(0, len(tokens) - 1)))
        tokens.append(ids[len(path)] if goes_on else draw(st.integers(0, VOCAB_SIZE - 1)))
        if goes_on:
            path.append(len(tokens) - 1)
    return DraftTree(tuple(tokens), tuple(parents), (None,) * len(tokens), (0.0,) * len(tokens)), tuple(path)


def test_the_last_tree_of_a_full_context_fits():
    limit = target("qwen2").context_limit
    session = target("qwen2").open(text(limit - 8), 8, "fast")
    bushy = DraftTree(tuple(text(8)), (0,) * 8, (None,) * 8, (0.0,) * 8)
    assert torch.isfinite(session.score(bushy)).all()


def test_bits_that_depend_on_the_pass_are_found_before_they_are_promised(monkeypatch):
    compute = NativeModel.compute

    def planted_compute(self, segments, logits_RV, *args):
        compute(self, segments, logits_RV, *args)
        logits_RV *= 1 + 1e-6 * len(logits_RV)

    monkeypatch.setattr(NativeModel, "compute", planted_compute)
    planted = NativeTarget(exact("llama"), name="planted", precision="packed16")
    with pytest.raises(ModeRefused, match=r"decode\.mode = 'fast'"):
        planted.open(text(4), 10, "reproducible")
    planted.open(text(4), 10, "fast")


def test_the_fingerprint_names_what_a_text_depends_on():
    others = [target("llama", "int8"), target("qwen2")]
    assert len({target("llama").fingerprint, *(other.fingerprint for other in others)}) == 3


def test_a_closed_session_frees_its_keys_and_closing_twice_is_allowed():
    session = target("llama").open(text(9), 5, "fast")
    session.close()
    session.close()
    assert session.backend.kv.numel() == 0


@pytest.mark.parametrize(("activation", "kind"), [("silu", "NativeTarget"), ("tanh", "TransformersTarget")])
def test_a_model_folder_is_run_by_what_can_run_it(tmp_path, activation, kind):
    LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act=activation)).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_target(tmp_path, name="x", precision="packed16")
    assert type(loaded).__name__ == kind


def test_memory_comes_with_the_ids_and_changes_no_bit(monkeypatch):
    ids = text(90)
    expected = one_by_one("llama", "packed16", ids)
    monkeypatch.setattr(native_model, "_CAPACITY_STEP", 16)
    session = target("llama").open(ids[:1], 150, "reproducible")
    for number, token in enumerate(ids):
        assert session.backend.kv.nbytes <= target("llama").kv_bytes(number + 1, "reproducible")
        assert torch.equal(session.score(DraftTree.empty(token))[0], expected[number])
        session.keep((0,))
