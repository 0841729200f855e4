"""Test whether samples follow a distribution: total variation between counts and probabilities, against a limit.

Cells with an expected count below 5 are pooled into one. TV of n samples drawn from p itself has a mean of at
most m = 1/2 sum_c min(sqrt(p_c (1 - p_c) / n), 2 p_c (1 - p_c)), since E|X/n - p| is bounded by the deviation of a
binomial and by that of its single draws. Above its mean it follows both
    P(TV >= m + sqrt(x / 2n)) <= e^-x                           (McDiarmid 1989: a sample moves TV by 1/n)
    P(TV >= m + sqrt(2x (s + 2m) / n) + x / 3n) <= e^-x         (Bousquet 2002, theorem 2.3)
where s is the largest variance P(A) (1 - P(A)) of any set of cells: tighter where one cell has most of the mass.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

Cell = tuple[int, ...]
"""One token, or two."""

FALSE_ALARM_PROBABILITY = 1e-6
"""Largest probability that samples of the distribution itself exceed the limit."""
MIN_EXPECTED = 5.0


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """The result of testing one position."""

    position: int
    """1: the first token of the answer; 2: the first two together."""
    samples: int
    cells: int
    """Number of cells, the pooled one included."""
    tv: float
    tv_limit: float
    """The limit at these odds of a false alarm, plus `rounding`."""
    rounding: float
    """Total variation between the probabilities of plain and of drafting passes, from their logits."""
    impossible: int
    """Number of samples to which no pass gives any probability."""
    logit_difference: float
    """Largest difference of one logit between the plain passes and those that drafted."""
    logit_limit: float
    odds: float = FALSE_ALARM_PROBABILITY

    @property
    def passed(self) -> bool:
        is_within_rounding = self.logit_difference <= self.logit_limit
        return self.tv <= self.tv_limit and not self.impossible and is_within_rounding


def total_variation(p: Mapping[Cell, float], counts: Mapping[Cell, int], num_samples: int) -> float:
    """Return 1/2 sum |p - counts / n|, in [0, 1]; everything outside `p` is one more cell."""
    rest = (1 - math.fsum(p.values())) - (num_samples - sum(counts.get(cell, 0) for cell in p)) / num_samples
    difference = math.fsum(abs(each - counts.get(cell, 0) / num_samples) for cell, each in p.items())
    return (difference + abs(rest)) / 2


def tv_limit(p: Mapping[Cell, float], num_samples: int, odds: float = FALSE_ALARM_PROBABILITY) -> float:
    """Return a limit that samples of these cells and the rest exceed with probability `odds` at most."""
    cells = [*p.values(), max(0.0, 1 - math.fsum(p.values()))]
    n, x = num_samples, -math.log(odds)
    mean = math.fsum(min(math.sqrt(each * (1 - each) / n), 2 * each * (1 - each)) for each in cells if each < 1) / 2
    likeliest = max(cells)
    variance = likeliest * (1 - likeliest) if likeliest > 0.5 else 0.25
    bousquet = math.sqrt(2 * x * (variance + 2 * mean) / n) + x / (3 * n)
    return min(1.0, mean + min(math.sqrt(x / (2 * n)), bousquet))
