"""Kernels for different instruction sets: which bits they share, and that a row is what it is alone in each of them."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn

from omnidraft.models.native import library as native
from omnidraft.models.native.build import VARIANTS, is_announced
from omnidraft.models.native.drafter import NativeDrafter
from omnidraft.models.native.thread_count import ThreadCount
from omnidraft.models.precision import PackedLinear
from omnidraft.models.probe.choice import NOT_PORTABLE
from tests.unit.models.native.packed_levels import packed
from tests.unit.models.tiny import text, tiny_model

pytestmark = pytest.mark.long

ANNOUNCED = [name for name in VARIANTS if is_announced(name)]
KINDS = ["float32", "bfloat16", "int8", "int4"]
SIZES = [(64, 32), (96, 300), (40, 1536), (16, 4128)]
"""N, K: one group and many, whole tiles and parts of them."""
NUM_ROWS = 70
ROUNDED_INPUTS = "avx512_bf16"
"""Its products are of inputs in bfloat16."""


@lru_cache
def layer(size: tuple[int, int], kind: str, variant: str) -> PackedLinear:
    torch.manual_seed(0)
    num_out, num_in = size
    weight = nn.Linear(num_in, num_out, bias=False).weight
    return PackedLinear(weight, None, kind, native.load(variant), ThreadCount())


@lru_cache
def inputs(num_in: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(NUM_ROWS, num_in) * 10 ** torch.linspace(-4, 4, NUM_ROWS)[:, None]


@pytest.mark.parametrize("variant", ANNOUNCED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_row_does_not_depend_on_the_number_of_rows(size, kind, variant):
    linear, x_RK = layer(size, kind, variant), inputs(size[1])
    together = linear(x_RK)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64):
        assert torch.equal(linear(x_RK[-rows:]), together[-rows:]), rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_equal_names_of_arithmetic_are_equal_bits(size, kind):
    found: dict[str, torch.Tensor] = {}
    for variant in ANNOUNCED:
        product = layer(size, kind, variant)(inputs(size[1]))
        assert torch.equal(found.setdefault(native.bits(native.load(variant), kind), product), product), variant
    others = NOT_PORTABLE & set(ANNOUNCED) if kind == "bfloat16" else ()
    assert len(found) == min(1 + len(others), len(ANNOUNCED))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(40, 96), (37, 50)])
def test_every_variant_packs_the_same_bytes(size, kind):
    """A packed file serves all of them."""
    torch.manual_seed(0)
    weight_NK = torch.randn(size) * 10 ** torch.linspace(-9, 4, size[0])[:, None]
    weight_NK[::3, ::7] *= 50
    weight_NK[1::5] = (
        weight_NK[1::5, :1] + torch.randint(0, 2, (1, size[1])) * torch.linspace(0, 1, size[0])[1::5, None]
    )
    assert len({packed(weight_NK, kind, native.load(variant)) for variant in ANNOUNCED}) == 1


@pytest.mark.parametrize("variant", [name for name in ANNOUNCED if name != ROUNDED_INPUTS])
@pytest.mark.parametrize("size", SIZES)
def test_sixteen_bit_products_are_those_of_exact_inputs(size, variant):
    """The inputs of matrix instructions are two parts of 8 bits of mantissa each."""
    linear, x_RK = layer(size, "bfloat16", variant), inputs(size[1])
    torch.manual_seed(0)
    weights_NK = nn.Linear(size[1], size[0], bias=False).weight.detach().bfloat16().double()
    error_RN = linear(x_RK).double() - x_RK.double() @ weights_NK.T
    scale_R1 = x_RK.double().norm(dim=1, keepdim=True) * weights_NK.norm(dim=1).mean()
    assert float((error_RN / scale_R1).abs().max()) < 2e-5


@pytest.mark.skipif(ROUNDED_INPUTS not in ANNOUNCED, reason="this processor has no AVX512_BF16")
@pytest.mark.parametrize("size", SIZES)
def test_rounded_inputs_are_summed_in_pairs_the_second_first(size):
    """So every processor with that instruction gives these bits."""
    linear, x_RK = layer(size, "bfloat16", ROUNDED_INPUTS), inputs(size[1])
    torch.manual_seed(0)
    weights_NK = nn.Linear(size[1], size[0], bias=False).weight.detach().bfloat16().double()
    rounded_RK, expected_RN = x_RK.bfloat16().double(), torch.zeros(NUM_ROWS, size[0])
    for pair in range(0, size[1], 2):
        for k in range(min(pair + 1, size[1] - 1), pair - 1, -1):
            # A product has 16 bits, so that float64 holds it and nearly every sum: one rounding, as fused.
            expected_RN = (expected_RN.double() + rounded_RK[:, k, None] * weights_NK[:, k]).float()
    assert float((linear(x_RK) == expected_RN).float().mean()) > 0.9999


@pytest.mark.parametrize("precision", ["float32", "packed16", "int8", "int4"])
def test_a_fleet_with_portable_kernels_computes_the_same_logits(precision):
    logits = []
    for variant in ("portable", *(name for name in ANNOUNCED if precision != "packed16" or name not in NOT_PORTABLE)):
        session = NativeDrafter(tiny_model("qwen2").float(), precision, variant).open()
        session.prefill_or_extend(0, text(60))
        logits.append(session.branch(text(20, seed=3), range(-1, 19)))
    assert all(np.array_equal(each, logits[0]) for each in logits)
