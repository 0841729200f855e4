"""Number formats: close to float32, and smaller; packed layers compute every row by itself, with equal bits in
reproducible mode."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear

from omnidraft.models import precision as precisions
from omnidraft.models.hf.target import TransformersTarget
from omnidraft.models.native import library
from omnidraft.models.native.thread_count import ThreadCount
from omnidraft.models.precision import PackedLinear
from tests.unit.models.drafted_trees import scores_by_partition
from tests.unit.models.native.families import family_model
from tests.unit.models.native.packed_levels import rounds_inputs, unpacked
from tests.unit.models.tiny import PASSES, SHAPE, text, tiny_model, whole_pass

PRECISIONS = ["packed16", "int8", "int4"]


def max_error_of_bfloat16(precision: str) -> float:
    """Return the same for bfloat16 weights."""
    return {"packed16": 0.02 if rounds_inputs() else 5e-5, "int8": 0.08, "int4": 0.8}[precision]


@pytest.fixture(scope="module")
def kernels():
    return library.load()


@pytest.fixture(params=["bfloat16", "int8", "int4"])
def kind(request):
    return request.param


@pytest.fixture(params=PRECISIONS)
def precision(request):
    return request.param


def packed(linear: nn.Linear, kind: str, kernels: library.Library) -> PackedLinear:
    return PackedLinear(linear.weight, linear.bias, kind, kernels, ThreadCount())


def rounded(weight_NK: torch.Tensor, kind: str, kernels: library.Library) -> torch.Tensor:
    """Return weights of 8 bits of mantissa, or those of the packed levels."""
    if kind == "bfloat16":
        return weight_NK.bfloat16().float()
    return unpacked(weight_NK, kind, kernels).float()


def rounded_inputs(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return inputs as the kernels take them: of 127 levels on each side of zero, with a step for every 64 or 32."""
    if kind == "bfloat16":
        return x.bfloat16().float() if rounds_inputs() else x
    per_step = {"int8": 64, "int4": 32}[kind]
    parts = nn.functional.pad(x, (0, -x.shape[-1] % per_step)).unflatten(-1, (-1, per_step))
    step = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / step).round() * step).flatten(-2)[..., : x.shape[-1]]


@pytest.mark.parametrize(("num_in", "num_out"), [(96, 40), (33, 17)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_computes_with_weights_of_its_kind(kernels, kind, num_in, num_out, has_bias):
    torch.manual_seed(0)
    layer = nn.Linear(num_in, num_out, bias=has_bias)
    x = torch.randn(2, 5, num_in)
    weight = rounded(layer.weight.detach(), kind, kernels)
    expected = nn.functional.linear(rounded_inputs(x, kind), weight, layer.bias)
    torch.testing.assert_close(packed(layer, kind, kernels)(x), expected.detach(), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_tells_the_weights_that_it_computes_with(kernels, kind, has_bias):
    layer = nn.Linear(96, 40, bias=has_bias)
    weight = packed(layer, kind, kernels).weight
    torch.testing.assert_close(weight, rounded(layer.weight.detach(), kind, kernels), atol=1e-5, rtol=1e-5)


def test_a_row_does_not_know_of_the_others(kernels, kind):
    torch.manual_seed(0)
    layer = packed(nn.Linear(300, 96), kind, kernels)
    x = torch.randn(70, 300) * torch.logspace(-4, 4, 70)[:, None]
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in (2, 3, 5, 8, 9, 13, 16, 17, 31, 33, 64, 70):
        assert torch.equal(layer(x[-rows:]), alone[-rows:]), rows


def test_a_pass_that_reads_nothing_gives_nothing(kernels, kind):
    assert packed(nn.Linear(64, 6), kind, kernels)(torch.zeros(1, 0, 64)).shape == (1, 0, 6)


def test_inputs_of_16_bits_are_computed_with_as_numbers(kernels, kind):
    torch.manual_seed(0)
    layer, x = packed(nn.Linear(64, 6), kind, kernels), torch.randn(3, 64).bfloat16()
    assert torch.equal(layer(x), layer(x.float()))


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_models_logits_stay_close_and_its_head_keeps_8_bits(precision, name):
    exact = copy.deepcopy(tiny_model(name)).to(torch.bfloat16).float()
    packed = precisions.apply(copy.deepcopy(exact), precision)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    assert packed.lm_head._kind == library.KINDS["bfloat16" if precision == "packed16" else "int8"]
    ids = text(15)
    expected, got = whole_pass(exact, ids), whole_pass(packed, ids)
    assert (got - expected).std() / expected.std() < max_error_of_bfloat16(precision)


def test_a_packed_target_keeps_its_bits_however_the_text_was_drafted(precision):
    model = precisions.apply(copy.deepcopy(tiny_model("gemma3")), precision)
    target = TransformersTarget(model, PASSES, name="gemma3", precision=precision)
    plain, *drafted = [
        scores_by_partition(target, text(19), text(11, seed=3), sizes)
        for sizes in ([1] * 12, [4, 4, 4], [1, 3, 4, 2, 2])
    ]
    assert all(torch.equal(scores, plain) for scores in drafted)


def test_automatic_is_a_format_this_machine_computes():
    chosen = precisions.automatic()
    logits = whole_pass(tiny_model("llama", chosen), text(4))
    assert torch.isfinite(logits).all()


def test_16_bits_leave_the_frequencies_of_positions_as_transformers_loads_them(tmp_path):
    """Rounded to bfloat16 they are off by whole turns a few hundred ids later."""
    exact = copy.deepcopy(tiny_model("llama")).to(torch.float32)
    exact.save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    served = precisions.apply(exact, "bfloat16")
    assert served.model.rotary_emb.inv_freq.dtype == torch.float32
    ids_1S = torch.tensor([text(250)])
    with torch.no_grad():
        assert torch.equal(served(ids_1S).logits, expected(ids_1S).logits)


@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss"])
def test_experts_are_packed_like_other_matrices_and_no_row_knows_of_the_others(name, precision):
    exact, ids = family_model(name), text(15)
    model = precisions.apply(copy.deepcopy(exact), precision, "portable")
    assert max(parameter.dim() for parameter in model.model.layers.parameters()) == 2  # the routers' matrices
    expected, got = whole_pass(exact, ids), whole_pass(model, ids)
    assert (got - expected).std() / expected.std() < {"packed16": 1e-5, "int8": 0.2, "int4": 0.8}[precision]
    TransformersTarget(model, PASSES, name=name, precision=precision, kernels="portable").self_test(64)


def test_weights_that_stay_unpacked_are_told(caplog):
    precisions.apply(copy.deepcopy(family_model("Mixtral")), "int8", "portable")
    assert not caplog.records
    sizes = {"kv_lora_rank": 16, "n_routed_experts": 4, "moe_topk": 2, "num_layers": 1, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longcat_flash", **{**SHAPE, **sizes}))
    precisions.apply(model, "int8", "portable")
    assert re.match(r"LongcatFlash\w*: \d+ % of the weights are in modules that our", caplog.records[0].getMessage())


def test_matrices_that_have_their_inputs_first_are_packed(precision):
    config = AutoConfig.for_model("gpt2", vocab_size=300, n_embd=64, n_head=4, n_layer=2, n_positions=64)
    exact = AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16).float()
    model, ids = precisions.apply(copy.deepcopy(exact), precision, "portable"), text(15)
    assert not any(type(module).__name__ == "Conv1D" for module in model.modules())
    expected, got = whole_pass(exact, ids), whole_pass(model, ids)
    assert (got - expected).std() / expected.std() < {"packed16": 1e-5, "int8": 0.08, "int4": 0.8}[precision]


def test_layers_that_compute_more_than_a_product_stay_as_they_are():
    class Router(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    model = copy.deepcopy(tiny_model("llama"))
    model.model.router, model.model.product = Router(9, 4), FalconLinear(9, 4)
    packed = precisions.apply(model, "int8").model
    assert isinstance(packed.router, Router)
    assert isinstance(packed.product, PackedLinear)


def test_embeddings_that_compute_more_than_a_look_up_stay_as_they_are():
    class Positions(nn.Embedding):
        def forward(self, ids, offset=2):
            return super().forward(ids + offset)

    model = copy.deepcopy(tiny_model("llama"))
    model.model.extra = Positions(9, 4)
    assert isinstance(precisions.apply(model, "int8").model.extra, Positions)
