"""Models the duration of another engine's pass by its number of rows, learned from the passes as they come.

Passes cannot be run for measuring, so an unknown size is probed a few times in regular rounds, and all others follow.
Small sizes come first, and those of several tokens only while a good drafter could gain by them: with many sequences a
probe of the largest size takes as long as many plain passes.
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
_MAX_GAP = 2.5
"""Sizes between two known ones are known too when the larger has at most so many times the rows of the smaller."""
_GOOD_AGREEMENT = 0.8
"""Share of a good drafter's tokens that are accepted; a size by which even that loses is not probed."""
_EXACT_ROWS = 8
"""Sizes up to here are distinguished; larger ones are grouped with those near them."""
_GROWTH = 1.1
"""Each group's rows are so many times those of the one before: the first drafts of 16 texts cost more than their rows,
since other code of the engine then runs, and must not count as plain passes."""
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

    def __call__(self, rows: int) -> float:
        if rows > self._rows[-1]:
            return float(self._seconds[-1] + self._slope() * (rows - self._rows[-1]))
        return float(np.interp(rows, self._rows, self._seconds))

    def least(self, rows: int, known_rows: int | None = None) -> float:
        """See policy.cost_model.Seconds. Probes measure what is unknown, so no trial has to."""
        return self(rows)

    def update(self, rows: int, seconds: float) -> None:
        """Add the duration of one pass."""
        log_s, size = math.log(max(seconds, 1e-9)), self._sizes.get(_size(rows))
        if size is None:
            self._sizes[_size(rows)] = _Size(log_s, 1)
        else:
            self._update_size(size, log_s)
        self._tabulate()

    def probe_length(self, num_seqs: int, longest: int) -> int | None:
        """Return the number of tokens to draft per sequence to measure an unknown size; None when all that may
        pay are known. A size that was begun is finished, since its first pass may have warmed something up."""
        for length in sorted({0, min(1, longest), longest // 2, longest}):
            rows = num_seqs * (1 + length)
            is_begun = 0 < self._num_seen(rows) < _MIN_SAMPLES
            if length > 1 and not is_begun and not self._may_pay(num_seqs, length):
                return None
            if not self._is_covered(rows) and self._num_probes[_size(rows)] < _MAX_PROBES:
                return length
        return None

    def count_probe(self, rows: int) -> None:
        """Count a round that drafted so many rows to measure them, whether its pass was a sample or not."""
        self._num_probes[_size(rows)] += 1

    def _may_pay(self, num_seqs: int, length: int) -> bool:
        """Return whether a good drafter's chains of this length would give more tokens per second than plain passes, if
        passes go on growing as they do among the known sizes."""
        num_tokens = sum(_GOOD_AGREEMENT**depth for depth in range(length + 1))
        return num_tokens * self(num_seqs) > self(num_seqs * (1 + length))

    def _is_covered(self, rows: int) -> bool:
        """Return whether this size is known, or lies between two known ones that are near each other."""
        known = [number for number in self._sizes if self._num_seen(number) >= _MIN_SAMPLES]
        below = [number for number in known if number <= _size(rows)]
        above = [number for number in known if number >= _size(rows)]
        return bool(below and above) and min(above) <= _MAX_GAP * max(below)

    def _num_seen(self, rows: int) -> int:
        size = self._sizes.get(_size(rows))
        return size.num_seen if size else 0

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
        """Return the seconds of a row beyond the largest size seen: those of a row in its upper half, since rows that
        memory bounds are free below it."""
        if len(self._rows) < 2:
            return float(self._seconds[0] * _UNKNOWN_SLOPE)
        below = max(self._rows[-1] / 2, self._rows[0])
        return float((self._seconds[-1] - self(below)) / (self._rows[-1] - below))


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
