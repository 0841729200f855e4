"""Ratios of sums over requests, whose requests are drawn at random."""

from dataclasses import dataclass
from math import inf, sqrt

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
