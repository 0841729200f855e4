"""Every family that the kernels know gives the logits of transformers, the same bits by any number of rows."""

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from omnidraft.models.native.drafter import NativeDrafter
from omnidraft.models.native.families import FAMILIES as KNOWN
from omnidraft.models.native.target import NativeTarget
from omnidraft.models.native.weights import unsupported_reason
from tests.unit.models.native.families import FAMILIES, family_model
from tests.unit.models.tiny import SHAPE, text

LENGTH = 60
IN_MODELS_OF_IMAGES = {"qwen2_5_vl_text", "qwen3_vl_text"}
"""Types of text models that are parts of others only; tests/unit/models/hf/test_families.py has them."""


def expected(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_past_every_window(name):
    model, ids = family_model(name), text(LENGTH)
    assert unsupported_reason(model) is None
    session = NativeDrafter(model, "float32").open()
    rows = [
        session.prefill_or_extend(0, ids[:30]),
        *(session.prefill_or_extend(n, [ids[n]]) for n in range(30, LENGTH)),
    ]
    reference = expected(model, ids)[29:]
    torch.testing.assert_close(torch.from_numpy(np.stack(rows)), reference, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_gives_the_bits_of_one_id_at_a_time(name):
    NativeTarget(family_model(name), name=name, precision="int8").self_test(16)


@pytest.mark.parametrize("name", FAMILIES)
def test_branches_see_their_ancestors_within_the_window(name):
    model, ids = family_model(name), text(LENGTH)
    siblings, chain = [7, 8, 9], ids[30:]
    parents = [-1, -1, -1, -1, *range(3, 32)]  # so that slots of the chain are not its positions
    session = NativeDrafter(model, "float32").open()
    session.prefill_or_extend(0, ids[:30])
    rows = torch.from_numpy(session.branch([*siblings, *chain], parents))
    torch.testing.assert_close(rows[3:], expected(model, ids)[30:], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(rows[2], expected(model, [*ids[:30], 9])[-1], atol=2e-3, rtol=2e-3)


def test_large_gates_of_gpt_oss_are_clamped():
    model, ids = copy.deepcopy(family_model("gpt-oss")), text(20)
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.mul_(8)
    logits = torch.from_numpy(NativeDrafter(model, "float32").open().prefill_or_extend(0, ids))
    torch.testing.assert_close(logits, expected(model, ids)[-1], atol=2e-3, rtol=2e-3)


def test_every_known_family_has_a_tiny_model():
    assert {tiny.model_type for tiny in FAMILIES.values()} | IN_MODELS_OF_IMAGES == set(KNOWN)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "tanh"}, "its activation is tanh"),
        ({"head_dim": 24}, "a head has 24 values"),
    ],
)
def test_what_the_pass_does_not_compute_is_said(change, reason):
    assert reason in (unsupported_reason(LlamaForCausalLM(LlamaConfig(**SHAPE | change))) or "")


@pytest.mark.parametrize(
    ("family", "owner", "reason"),
    [
        ("Llama 3", "model.layers.1.self_attn", "its layers have a self_attn.extra"),
        ("MiniMax M2", "model.layers.1.mlp", "its layers have a mlp.extra"),
        ("gpt-oss", "model.layers.1.self_attn", "its layers have a self_attn.extra"),
        ("GLM-4.5", "model.layers.1.mlp.gate", "its layers have a mlp.gate.extra"),
        ("Qwen3", "model", "it has extra"),
    ],
)
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_weight_that_no_description_reads_is_said(family, owner, reason, is_trained):
    model, values = copy.deepcopy(family_model(family)), torch.ones(4)
    model.get_submodule(owner).extra = torch.nn.Parameter(values) if is_trained else torch.nn.Buffer(values)
    assert unsupported_reason(model) == reason
