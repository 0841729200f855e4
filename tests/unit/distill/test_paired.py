"""The error of a paired change of agreement, against what repeated draws of requests show."""

import numpy as np
import pytest

from omnidraft.distill.agreement import Agreed
from omnidraft.distill.paired import change_error


def drawn(rng: np.random.Generator, num_requests: int) -> list[tuple[str, Agreed, Agreed]]:
    """Requests of several lengths, each easier or harder than others for the later snapshot."""
    pairs = []
    for request in range(num_requests):
        gain = rng.normal(0.03, 0.05)
        for _ in range(rng.integers(1, 3)):
            length = int(rng.integers(10, 80))
            before, after = rng.binomial(length, 0.6), rng.binomial(length, 0.6 + gain)
            pairs.append((f"r{request}", Agreed(int(before), length), Agreed(int(after), length)))
    return pairs


def change(pairs: list[tuple[str, Agreed, Agreed]]) -> float:
    return sum(b.num_agreed - a.num_agreed for _, a, b in pairs) / sum(b.num_scored for _, _, b in pairs)


def test_it_is_the_spread_of_the_change_over_repeated_draws() -> None:
    rng = np.random.default_rng(0)
    draws = [drawn(rng, 40) for _ in range(600)]
    told = float(np.mean([change_error(pairs) for pairs in draws]))
    seen = float(np.std([change(pairs) for pairs in draws]))
    assert told == pytest.approx(seen, rel=0.1)


def test_segments_of_one_request_are_one_draw() -> None:
    whole = [
        ("a", Agreed(10, 20), Agreed(14, 20)),
        ("b", Agreed(9, 20), Agreed(9, 20)),
        ("c", Agreed(3, 9), Agreed(3, 9)),
    ]
    halves = [(name, Agreed(b.num_agreed, b.num_scored), a) for name, b, a in whole[1:]]
    halves += [("a", Agreed(5, 10), Agreed(7, 10)), ("a", Agreed(5, 10), Agreed(7, 10))]
    assert change_error(halves) == pytest.approx(change_error(whole))


def test_one_request_says_nothing_of_the_spread() -> None:
    assert change_error([("a", Agreed(1, 9), Agreed(3, 9)), ("a", Agreed(1, 9), Agreed(3, 9))]) is None
    assert change_error([("a", Agreed(1, 9), Agreed(3, 9)), ("b", Agreed(0, 0), Agreed(0, 0))]) is None
