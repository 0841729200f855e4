"""Number formats: close to float32, and smaller."""

import copy

import pytest
import torch

from omnidraft.models import precision as precisions
from omnidraft.models.precision import PackedLinear
from tests.unit.models.tiny import CONFIGS, text, tiny_model, whole_pass

HOW_FAR = {"packed16": 0.004, "bfloat16": 0.05, "int8": 0.2}
"""Of the spread of the logits; formats keep 11, 8 and 7 bits of each factor, int8 of one scale a row."""


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", HOW_FAR)
def test_logits_stay_close_to_those_of_float32(name, precision):
    """The embedding table is rounded to bfloat16 first: catalog models are bfloat16, so real ones lose nothing."""
    exact = copy.deepcopy(tiny_model(name))
    exact.get_input_embeddings().weight.data = exact.get_input_embeddings().weight.bfloat16().float()
    rounded = precisions.apply(copy.deepcopy(exact), precision)
    ids = text(15)
    expected, got = whole_pass(exact, ids), whole_pass(rounded, ids)
    assert (got - expected).std() / expected.std() < HOW_FAR[precision]


def test_every_matrix_of_a_packed_model_is_packed():
    packed = tiny_model("qwen2", "packed16")
    kinds = [type(module) for module in packed.modules()]
    assert torch.nn.Linear not in kinds
    assert kinds.count(PackedLinear) == 3 * 7 + 1


@pytest.mark.parametrize("precision", ["packed16", "int8"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_layer_computes_what_its_layer_did(precision, has_bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 32, bias=has_bias)
    x = torch.randn(2, 5, 48)
    torch.testing.assert_close(PackedLinear(linear, precision)(x), linear(x), atol=0.05, rtol=0.02)


def test_a_packed_layer_takes_a_pass_that_reads_nothing():
    """Prefill asks for no logits."""
    assert PackedLinear(torch.nn.Linear(8, 6), "packed16")(torch.zeros(1, 0, 8)).shape == (1, 0, 6)


def test_automatic_is_a_format_this_machine_computes():
    chosen = precisions.automatic()
    logits = whole_pass(tiny_model("llama", chosen), text(4))
    assert torch.isfinite(logits).all()
