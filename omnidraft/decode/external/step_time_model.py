"""Models the duration of another engine's pass by its number of rows, learned from the passes as they come.

Passes cannot be run for measuring, so an unknown size is probed a few times in regular rounds, and all others follow.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MIN_SAMPLES = 2
"""Passes of one size before it counts as known."""
_MAX_PROBES = 8
"""Times that a size is probed; passes that also read prompts are no sample, and there may be no others."""
_EXACT_ROWS = 8
"""Sizes up to here are distinguished; larger ones are grouped with those near them."""
_GROWTH = 1.3
_OWN_WEIGHT, _SHARED_WEIGHT = 0.15, 0.05
"""Shares of an error that correct the size itself, and all sizes because the machine's load changed."""
_MAX_LOG_ERROR = math.log(2)
_UNKNOWN_SLOPE = 0.02
"""Share that a row adds to a pass while only one size was seen."""


@dataclass(slots=True)
class _Size:
    log_s: float
    num_seen: int


class StepTimeModel:
    """Seconds by number of rows; never falls with more rows, because that can only be noise."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_probes: Counter[int] = Counter()
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
        """Add the duration of one pass."""
        log_s, size = math.log(max(seconds, 1e-9)), self._sizes.get(_size(rows))
        if size is None:
            self._sizes[_size(rows)] = _Size(log_s, 1)
        else:
            self._update_size(size, log_s)
        self._tabulate()

    def probe_length(self, num_seqs: int, longest: int) -> int | None:
        """Return the number of tokens to draft per sequence to measure an unknown size; None when all sizes are
        known."""
        for length in dict.fromkeys((longest, 0, longest // 2, 1)):
            number = _size(num_seqs * (1 + length))
            size = self._sizes.get(number)
            if (size is None or size.num_seen < _MIN_SAMPLES) and self._num_probes[number] < _MAX_PROBES:
                self._num_probes[number] += 1
                return length
        return None

    def _update_size(self, size: _Size, log_s: float) -> None:
        log_error = log_s - size.log_s
        if size.num_seen < _MIN_SAMPLES:  # the first pass of a size may have warmed something up
            size.log_s = min(size.log_s, log_s) if log_error < 0 else size.log_s
        else:
            log_error = min(max(log_error, -_MAX_LOG_ERROR), _MAX_LOG_ERROR)
            size.log_s += _OWN_WEIGHT * log_error
            for each in self._sizes.values():
                each.log_s += _SHARED_WEIGHT * log_error
        size.num_seen += 1

    def _tabulate(self) -> None:
        rows = sorted(self._sizes)
        self._rows = np.array(rows, np.float64)
        self._seconds = _isotonic([math.exp(self._sizes[each].log_s) for each in rows])

    def _slope(self) -> float:
        """Return the seconds of a row beyond the largest size seen."""
        if len(self._rows) < 2:
            return float(self._seconds[0] * _UNKNOWN_SLOPE)
        return float((self._seconds[-1] - self._seconds[0]) / (self._rows[-1] - self._rows[0]))


def _size(rows: int) -> int:
    """Return the number of rows that stands for all near it."""
    if rows <= _EXACT_ROWS:
        return rows
    return round(_EXACT_ROWS * _GROWTH ** round(math.log(rows / _EXACT_ROWS, _GROWTH)))


def _isotonic(seconds: Sequence[float]) -> np.ndarray:
    """Return the nearest numbers that never fall: neighbours that do are averaged (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for each in seconds:
        pools.append((each, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (right, num_right), (left, num_left) = pools.pop(), pools.pop()
            pools.append(((left * num_left + right * num_right) / (num_left + num_right), num_left + num_right))
    return np.repeat([mean for mean, _ in pools], [num for _, num in pools])
