"""Means over few requests, with their standard errors, and what a change of them signifies."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist

import numpy as np


def p_value(change: float, error: float, degrees: int) -> float:
    """Return the probability of a change at least so large, upwards, where there is none.

    The Student statistic is turned into a normal one (Abramowitz and Stegun, Handbook of Mathematical Functions,
    26.7.8).

    Args:
        error: its standard error.
        degrees: the number of requests that it was measured on, less one.
    """
    if error == 0 or degrees < 1:
        return 0.0 if error == 0 and change > 1e-9 else 1.0
    student = change / error
    normal = student * (1 - 1 / (4 * degrees)) / sqrt(1 + student**2 / (2 * degrees))
    return 1 - NormalDist().cdf(normal)


LEAST_REQUESTS = 2
"""Fewer say nothing of how much requests differ."""


@dataclass(slots=True)
class Ratio:
    """The ratio of two sums over requests, with its standard error.

    Source: linearisation, Cochran, Sampling Techniques, section 6.3. Sums of squares stand in for the requests.
    """

    num: int = 0
    y: float = 0.0
    x: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    xx: float = 0.0

    def add(self, y: float, x: float) -> None:
        """Add one request's share of both sums."""
        self.num, self.y, self.x = self.num + 1, self.y + y, self.x + x
        self.yy, self.xy, self.xx = self.yy + y * y, self.xy + x * y, self.xx + x * x

    @property
    def estimate(self) -> float:
        """The ratio; 0 where the lower sum is."""
        return self.y / self.x if self.x else 0.0

    @property
    def error(self) -> float:
        """Its standard error; infinite for fewer than LEAST_REQUESTS."""
        if self.num < LEAST_REQUESTS or not self.x:
            return inf
        squares = max(self.yy - 2 * self.estimate * self.xy + self.estimate**2 * self.xx, 0.0)
        return sqrt(squares * self.num / (self.num - 1)) / self.x


def paired_standard_error(pairs: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> float | None:
    """Return the standard error of the change in agreement, positions of one request taken as one draw.

    The linearised error of a ratio of sums over clusters; Cochran, Sampling Techniques (1977), section 9A.

    Args:
        pairs: request id, and whether each position [P] agrees before and after, bool, for every record.

    Returns:
        None with fewer than two requests that have a position.
    """
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for request_id, before_P, after_P in pairs:
        sums[request_id][0] += int(after_P.sum()) - int(before_P.sum())
        sums[request_id][1] += len(after_P)
    clusters = [(gain, scored) for gain, scored in sums.values() if scored]
    if len(clusters) < 2:
        return None
    scored = sum(number for _, number in clusters)
    change = sum(gain for gain, _ in clusters) / scored
    residual = sum((gain - change * number) ** 2 for gain, number in clusters)
    return sqrt(len(clusters) / (len(clusters) - 1) * residual) / scored
