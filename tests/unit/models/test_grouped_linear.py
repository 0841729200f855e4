"""Quantised targets: close to what they were made from, every row by itself, equal bits in reproducible mode."""

import copy

import pytest
import torch
from torch import nn

from omnidraft.errors import ConfigError
from omnidraft.models import precision as precisions
from omnidraft.models import store
from omnidraft.models.native import library
from omnidraft.models.native.linear import GroupedLinear
from omnidraft.models.transformers_target import TransformersTarget
from omnidraft.ports import DraftTree
from tests.unit.models.tiny import SETTINGS, text, tiny_model, whole_pass

LEVELS = {"int8": 255, "int4": 15}


@pytest.fixture(scope="module")
def kernels():
    return library.load(store.default_home() / "native")


@pytest.fixture(params=LEVELS)
def kind(request):
    return request.param


def rounded(weight_NK: torch.Tensor, levels: int) -> torch.Tensor:
    """Weights in groups of 32 of their row, each group with `levels` equal steps from its lowest to its highest."""
    out_NK = weight_NK.clone()
    for start in range(0, weight_NK.shape[1], 32):
        group = weight_NK[:, start : start + 32]
        least = group.amin(1, keepdim=True).half().float()
        step = ((group.amax(1, keepdim=True) - least) / levels).half().float()
        out_NK[:, start : start + 32] = least + ((group - least) / step).round().clamp(0, levels) * step
    return out_NK


@pytest.mark.parametrize(("num_in", "num_out"), [(64, 48), (96, 40), (50, 7), (33, 17)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_computes_with_weights_of_that_many_levels(kernels, kind, num_in, num_out, has_bias):
    torch.manual_seed(0)
    layer = nn.Linear(num_in, num_out, bias=has_bias)
    x = torch.randn(2, 5, num_in)
    expected = nn.functional.linear(x, rounded(layer.weight.detach(), LEVELS[kind]), layer.bias)
    torch.testing.assert_close(GroupedLinear(layer, kind, kernels)(x), expected.detach(), atol=2e-3, rtol=1e-3)


def test_a_row_does_not_know_of_the_others(kernels, kind):
    torch.manual_seed(0)
    layer = GroupedLinear(nn.Linear(96, 40), kind, kernels)
    x = torch.randn(9, 96) * torch.logspace(-3, 3, 9)[:, None]
    alone = torch.cat([layer(row[None]) for row in x])
    for first in range(9):
        assert torch.equal(layer(x[first:]), alone[first:])


def test_a_pass_that_reads_nothing_gives_nothing(kernels, kind):
    assert GroupedLinear(nn.Linear(64, 6), kind, kernels)(torch.zeros(1, 0, 64)).shape == (1, 0, 6)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_a_models_logits_stay_close_and_its_head_keeps_8_bits(kind, name):
    exact = copy.deepcopy(tiny_model(name))
    exact.get_input_embeddings().weight.data = exact.get_input_embeddings().weight.bfloat16().float()
    quantised = precisions.quantise(copy.deepcopy(exact), kind)
    assert not any(isinstance(module, nn.Linear) for module in quantised.modules())
    assert quantised.lm_head._kind == library.KINDS["int8"]
    ids = text(15)
    expected, got = whole_pass(exact, ids), whole_pass(quantised, ids)
    assert (got - expected).std() / expected.std() < {"int8": 0.08, "int4": 0.8}[kind]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_a_quantised_target_keeps_its_bits_however_the_text_was_drafted(kind, name):
    model = precisions.quantise(copy.deepcopy(tiny_model(name)), kind)
    target = TransformersTarget(model, SETTINGS, name=name, precision=kind)
    prompt, following, scores = text(19), text(11, seed=3), []
    for sizes in ([1] * 12, [4, 4, 4], [1, 3, 4, 2, 2]):
        session, rows, ids = target.open(prompt, 40, "reproducible"), [], [prompt[-1], *following]
        for size in sizes:
            part, ids = ids[:size], ids[size:]
            rows.append(session.score(DraftTree(tuple(part), (0, *range(size - 1)), (None,) * size, (0.0,) * size)))
            session.keep(range(size))
        scores.append(torch.cat(rows))
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


def test_the_self_test_refuses_the_drafters_int8_whose_rows_share_a_scale():
    model = precisions.apply(copy.deepcopy(tiny_model("llama")), "int8")
    with pytest.raises(ConfigError, match=r"decode\.mode = 'fast'"):
        TransformersTarget(model, SETTINGS, name="x", precision="int8").open(text(4), 10, "reproducible")
