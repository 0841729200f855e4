"""The time of a token at the best number of rows, by which number formats are compared."""

import time
from collections.abc import Callable, Mapping

TOKENS_OF_ROWS = {1: 1.0, 5: 2.7, 8: 3.2, 16: 3.4}
"""Tokens that a pass of so many rows emits: chains of an untrained drafter on GSM8K (algorithms.md section 10)."""
_BUDGET_S = 0.3
"""Time budget for each format and number of rows, besides a first pass for warm-up."""
_MAX_PASSES = 20


def seconds_per_token(passes: Mapping[str, Callable[[int], object]]) -> dict[str, float]:
    """Return the time of one token in each format, at the number of rows that is best for it.

    The formats take turns, so that other load on the machine affects all of them.

    Args:
        passes: functions that compute one pass over a given number of rows, by the format's name.
    """
    best = dict.fromkeys(passes, float("inf"))
    for rows, tokens in TOKENS_OF_ROWS.items():
        for name, seconds in _fastest(passes, rows).items():
            best[name] = min(best[name], seconds / tokens)
    return best


def _fastest(passes: Mapping[str, Callable[[int], object]], rows: int) -> dict[str, float]:
    for compute in passes.values():
        compute(rows)
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(_MAX_PASSES):
        for name, compute in passes.items():
            if sum(times[name]) < _BUDGET_S:
                started = time.perf_counter()
                compute(rows)
                times[name].append(time.perf_counter() - started)
    return {name: min(each) for name, each in times.items()}
