"""Which of the kernels that work is taken, by the times of their trials."""

from pathlib import Path

import pytest

from omnidraft.models.probe.choice import Kernels, _fastest


def kernels(variant: str, **seconds_per_token: float) -> Kernels:
    return Kernels(variant, Path(variant), seconds_per_token)


@pytest.mark.parametrize(
    ("amx", "avx2", "chosen"),
    [
        ({"packed16": 7.1, "bfloat16": 13.3}, {"packed16": 10.1, "bfloat16": 10.2}, "amx"),
        ({"packed16": 46.0, "bfloat16": 76.5}, {"packed16": 22.0, "bfloat16": 39.6}, "amx"),  # beside other load
        ({"packed16": 30.0, "bfloat16": 12.0}, {"packed16": 10.0, "bfloat16": 12.0}, "avx2"),
        ({"packed16": 10.5}, {"packed16": 10.0}, "amx"),
        ({"packed16": 15.0}, {"packed16": 10.0}, "avx2"),
    ],
)
def test_the_fastest_is_taken_even_when_one_trial_met_other_load(
    amx: dict[str, float], avx2: dict[str, float], chosen: str
) -> None:
    found = {"amx": kernels("amx", **amx), "avx2": kernels("avx2", **avx2)}
    assert _fastest(found).variant == chosen
