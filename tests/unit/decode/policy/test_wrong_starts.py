"""A start beside other load turns drafting off for no longer than a few answers, by a virtual clock."""

import math
from functools import lru_cache

import pytest

from tests.unit.decode.policy.machines import MACHINES, decode, num_until, tokens_per_s, virtual_clock

STARTS = {
    "slow x4": ("pass step", 4, 0),
    "slow x10": ("pass step", 10, 0),
    "slow x4, longer": ("pass step", 4, 72),
    "slow x10, longer": ("pass step", 10, 72),
    "slow x4, for good": ("pass step", 4, math.inf),
    "slow passes x4": ("pass", 4, 0),
    "slow passes x10": ("pass", 10, 0),
    "slow steps x4": ("step", 4, 0),
    "slow steps x10": ("step", 10, 0),
    "fast x4": ("pass step", 0.25, 0),
    "fast passes x4": ("pass", 0.25, 0),
    "fast steps x10": ("step", 0.1, 0),
}
"""What is slower or faster while costs are measured, how many times, and for the time of how many plain passes more."""


@lru_cache
def quiet_rounds(name: str, num_texts: int) -> list[tuple[float, float]]:
    """Rounds after a start beside no load."""
    with virtual_clock(name) as machine:
        return decode(machine, 1000, num_texts)


def check_recovery(name: str, num_texts: int, start: str) -> None:
    """Nine tenths of a good start's speed within 330 tokens, and most of it over all."""
    (slow, factor, num_more), quiet = STARTS[start], quiet_rounds(name, num_texts)
    with virtual_clock(name) as machine:
        end_s = math.inf
        machine.load = lambda what: factor if what in slow and machine.now_s < end_s else 1.0

        def end_load() -> None:
            nonlocal end_s
            end_s = machine.now_s + num_more * MACHINES[name]["pass"][1]

        rounds = decode(machine, 1000, num_texts, after_start=end_load)
    kept = 1 / factor if num_more == math.inf else 1.0
    assert num_until(rounds, 0.9 * kept * tokens_per_s(quiet[len(quiet) // 2 :])) <= 330
    if num_more in (0, math.inf):
        assert tokens_per_s(rounds) >= 0.85 * kept * tokens_per_s(quiet)


@pytest.mark.parametrize(
    ("name", "num_texts", "start"),
    [
        ("AVX-512", 1, "slow x4"),
        ("AVX-512", 1, "slow x10, longer"),
        ("AVX-512", 1, "slow passes x10"),
        ("AVX-512", 1, "slow steps x10"),
        ("free rows", 1, "slow x10, longer"),
    ],
)
def test_a_start_beside_other_load_is_forgotten_within_330_tokens(name, num_texts, start):
    check_recovery(name, num_texts, start)


@pytest.mark.long
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("num_texts", [1, 4])
@pytest.mark.parametrize("name", MACHINES)
def test_every_start_is_forgotten_on_every_machine(name, num_texts, start):
    check_recovery(name, num_texts, start)


def test_drafting_pays_on_this_machine():
    rounds = quiet_rounds("AVX-512", 1)
    assert tokens_per_s(rounds[len(rounds) // 2 :]) > 1.5 / MACHINES["AVX-512"]["pass"][1]
