"""Who is killed next, and when: seeded."""

import random
from collections.abc import Callable, Sequence

SHARES = {"decode_worker": 25, "broker": 20, "registry": 20, "actor": 15, "distiller": 10, "controller": 10}
"""Of a hundred kills. `actor` is the process that learns, `distiller` the one that started it."""
LEAST_GAP = 0.1
"""Of the average."""


def order(num: int, dice: random.Random) -> list[str]:
    """Each as often as its share says, as far as that goes into so few, in random order."""
    total = sum(SHARES.values())
    whole = {name: share * num // total for name, share in SHARES.items()}
    rest = sorted(SHARES, key=lambda name: -(SHARES[name] * num % total))[: num - sum(whole.values())]
    names = [name for name, times in whole.items() for _ in range(times)] + rest
    dice.shuffle(names)
    return names


def gap_s(pace_s: float, dice: random.Random) -> float:
    """Seconds until the next kill, `pace_s` on average: any moment is as likely as any other."""
    return pace_s * LEAST_GAP + dice.expovariate(1 / (pace_s * (1 - LEAST_GAP)))


def pick(waiting: list[str], is_ready: Callable[[str], bool]) -> str | None:
    """Take the first of those that wait which can be killed now."""
    for name in dict.fromkeys(waiting):
        if is_ready(name):
            waiting.remove(name)
            return name
    return None


def counted(killed: Sequence[str]) -> dict[str, int]:
    """Kills by victim."""
    return {name: killed.count(name) for name in SHARES}
