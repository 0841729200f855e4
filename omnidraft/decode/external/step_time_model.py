"""What a pass of an engine costs by its number of rows, learned from the passes as they come.

Nobody can ask somebody else's engine for a pass, so what was never seen is tried a few times, and all else follows.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_TRIES = 2
"""Passes of one size before it counts as known."""
_MOST_OFFERS = 8
"""Times that a size is tried; passes that also read prompts tell nothing, and there may be no others."""
_EXACT_ROWS = 8
"""Sizes up to here are told apart; larger ones go together with those near them."""
_GROWTH = 1.3
_FOLLOWS_OWN, _FOLLOWS_ALL = 0.15, 0.05
"""Shares of a surprise: that the size itself is different, and that the machine is as busy for all sizes."""
_LARGEST_SURPRISE = math.log(2)
_UNKNOWN_SLOPE = 0.02
"""What a row adds to a pass while only one size was seen, as a share."""


@dataclass(slots=True)
class _Size:
    log_s: float
    num_seen: int


class StepTimeModel:
    """Seconds by rows; never falls with more rows, because that can only be noise."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._offers: Counter[int] = Counter()
        self._rows = np.array([1.0])
        self._seconds = np.array([1.0])

    @property
    def is_known(self) -> bool:
        """Whether any pass was seen."""
        return bool(self._sizes)

    def __call__(self, rows: int) -> float:
        if rows > self._rows[-1]:
            return float(self._seconds[-1] + self._slope() * (rows - self._rows[-1]))
        return float(np.interp(rows, self._rows, self._seconds))

    def update(self, rows: int, seconds: float) -> None:
        """A pass took so long."""
        told, size = math.log(max(seconds, 1e-9)), self._sizes.get(_size(rows))
        if size is None:
            self._sizes[_size(rows)] = _Size(told, 1)
        else:
            self._follow(size, told)
        self._tabulate()

    def untried(self, num_texts: int, longest: int) -> int | None:
        """How many tokens to draft for each of so many texts, to learn what that costs; None when all is known."""
        for length in dict.fromkeys((longest, 0, longest // 2, 1)):
            number = _size(num_texts * (1 + length))
            size = self._sizes.get(number)
            if (size is None or size.num_seen < _TRIES) and self._offers[number] < _MOST_OFFERS:
                self._offers[number] += 1
                return length
        return None

    def _follow(self, size: _Size, told: float) -> None:
        surprise = told - size.log_s
        if size.num_seen < _TRIES:  # the first pass of a size may have warmed something up
            size.log_s = min(size.log_s, told) if surprise < 0 else size.log_s
        else:
            surprise = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
            size.log_s += _FOLLOWS_OWN * surprise
            for each in self._sizes.values():
                each.log_s += _FOLLOWS_ALL * surprise
        size.num_seen += 1

    def _tabulate(self) -> None:
        rows = sorted(self._sizes)
        self._rows = np.array(rows, np.float64)
        self._seconds = _rising([math.exp(self._sizes[each].log_s) for each in rows])

    def _slope(self) -> float:
        """Seconds of a row beyond the largest size seen."""
        if len(self._rows) < 2:
            return float(self._seconds[0] * _UNKNOWN_SLOPE)
        return float((self._seconds[-1] - self._seconds[0]) / (self._rows[-1] - self._rows[0]))


def _size(rows: int) -> int:
    """The number of rows that stands for all near it."""
    if rows <= _EXACT_ROWS:
        return rows
    return round(_EXACT_ROWS * _GROWTH ** round(math.log(rows / _EXACT_ROWS, _GROWTH)))


def _rising(seconds: Sequence[float]) -> np.ndarray:
    """The nearest numbers that never fall: neighbours that do are averaged (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for each in seconds:
        pools.append((each, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (right, num_right), (left, num_left) = pools.pop(), pools.pop()
            pools.append(((left * num_left + right * num_right) / (num_left + num_right), num_left + num_right))
    return np.repeat([mean for mean, _ in pools], [num for _, num in pools])
