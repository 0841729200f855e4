"""Number formats: close to float32, and smaller."""

import copy

import pytest
import torch

from omnidraft.models import precision as precisions
from tests.unit.models.tiny import CONFIGS, text, tiny_model, whole_pass

HOW_FAR = {"packed16": 0.02, "bfloat16": 0.05, "int8": 0.08}
"""Of the spread of the logits; formats keep 8 bits of the weights, 8 of all factors, and 256 levels a group."""


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


def test_automatic_is_a_format_this_machine_computes():
    chosen = precisions.automatic()
    logits = whole_pass(tiny_model("llama", chosen), text(4))
    assert torch.isfinite(logits).all()
