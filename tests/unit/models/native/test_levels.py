"""The levels of packed weights: never farther from the weights than the full range's, and nearer for most weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.models.native import library as native
from tests.unit.models.native.packed_levels import full_range, unpacked

GROUP_ERROR = {"normal": 0.82, "uniform": 0.82, "outlier": 0.52}
"""The largest squared error beside the full range's, mean over many groups of such weights."""


@pytest.fixture(scope="module")
def kernels() -> native.Library:
    return native.load()


def weights(kind: str, shape: tuple[int, int], scale: float, offset: float, seed: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    match kind:
        case "constant":
            weight_NK = torch.ones(shape)
        case "uniform":
            weight_NK = torch.rand(shape, generator=draws)
        case "two values":
            weight_NK = torch.randint(0, 2, shape, generator=draws).float()
        case _:
            weight_NK = torch.randn(shape, generator=draws)
    if kind == "outlier":
        weight_NK[:, ::7] *= 30
    return (weight_NK + offset) * scale


def squared_errors(made_NK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each channel's only group."""
    return (made_NK.double() - weight_NK.double()).square().sum(1)


@given(
    kind=st.sampled_from(["normal", "uniform", "outlier", "constant", "two values"]),
    inputs=st.integers(1, native.GROUP),
    channels=st.integers(1, 20),
    exponent=st.integers(-8, 4),
    offset=st.sampled_from([0.0, 0.0, -3.0, 0.5, 100.0]),
    seed=st.integers(0, 2**16),
)
def test_no_group_is_farther_than_from_its_full_range(kernels, kind, inputs, channels, exponent, offset, seed):
    weight_NK = weights(kind, (channels, inputs), 10.0**exponent, offset, seed)
    weight_NK = weight_NK.clamp(-6e4, 6e4)  # what float16 can hold
    errors = squared_errors(unpacked(weight_NK, "int4", kernels), weight_NK)
    limits = squared_errors(full_range(weight_NK, "int4"), weight_NK)
    rounding = inputs * (1e-6 * float(weight_NK.abs().max())) ** 2
    assert (errors <= limits * 1.0001 + rounding).all()


@pytest.mark.parametrize("kind", GROUP_ERROR)
@pytest.mark.parametrize("inputs", [native.GROUP, 24])
def test_groups_are_nearer_than_to_their_full_range(kernels, kind, inputs):
    weight_NK = weights(kind, (4096, inputs), 0.02, 0.0, seed=0)
    errors = squared_errors(unpacked(weight_NK, "int4", kernels), weight_NK)
    limits = squared_errors(full_range(weight_NK, "int4"), weight_NK)
    assert errors.mean() < GROUP_ERROR[kind] * limits.mean()


@pytest.mark.parametrize(("lowest", "highest"), [(0, 15), (0, 7), (6, 15), (3, 11)])
def test_weights_that_were_quantised_to_four_bits_keep_their_levels(kernels, lowest, highest):
    torch.manual_seed(0)
    level = torch.randint(lowest, highest + 1, (512, native.GROUP))
    level[:, 0], level[:, 1] = lowest, highest
    weight_NK = level * 0.03125 - 0.25
    assert torch.equal(unpacked(weight_NK, "int4", kernels).float(), weight_NK)


def test_eight_bits_keep_the_full_range(kernels):
    weight_NK = weights("outlier", (37, 100), 0.02, 0.1, seed=0)
    torch.testing.assert_close(unpacked(weight_NK, "int8", kernels).float(), full_range(weight_NK, "int8"))
