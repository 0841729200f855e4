"""The order and the times of kills, from a seed."""

import random
from collections.abc import Callable, Sequence

SHARES = {"decode_worker": 25, "broker": 20, "registry": 20, "actor": 15, "distiller": 10, "controller": 10}
"""Kills of each process in a hundred. `actor` is the one that learns, `distiller` the one that started it."""
MIN_GAP = 0.1
"""The shortest gap as a share of the average."""


def order(num: int, rng: random.Random) -> list[str]:
    """Return `num` victims in random order, each as often as its share says, rounded."""
    total = sum(SHARES.values())
    whole = {name: share * num // total for name, share in SHARES.items()}
    rest = sorted(SHARES, key=lambda name: -(SHARES[name] * num % total))[: num - sum(whole.values())]
    names = [name for name, times in whole.items() for _ in range(times)] + rest
    rng.shuffle(names)
    return names


def gap_s(pace_s: float, rng: random.Random) -> float:
    """Draw the seconds until the next kill, exponential after a minimum, `pace_s` on average."""
    return pace_s * MIN_GAP + rng.expovariate(1 / (pace_s * (1 - MIN_GAP)))


def pick(waiting: list[str], is_ready: Callable[[str], bool]) -> str | None:
    """Remove the first name from `waiting` that is ready, and return it; None when none is."""
    for name in dict.fromkeys(waiting):
        if is_ready(name):
            waiting.remove(name)
            return name
    return None


def counts_by_victim(killed: Sequence[str]) -> dict[str, int]:
    """Return the number of kills of each victim."""
    return {name: killed.count(name) for name in SHARES}
