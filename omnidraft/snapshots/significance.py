"""The significance of a change of agreement: a mean over few requests, with its standard error.

The Student statistic is turned into a normal one (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.8).
"""

from math import sqrt
from statistics import NormalDist


def p_value(change: float, error: float, degrees: int) -> float:
    """Return the probability of a change at least so large, upwards, where there is none.

    Args:
        error: its standard error.
        degrees: the number of requests that it was measured on, less one.
    """
    if error == 0 or degrees < 1:
        return 0.0 if error == 0 and change > 1e-9 else 1.0
    student = change / error
    normal = student * (1 - 1 / (4 * degrees)) / sqrt(1 + student**2 / (2 * degrees))
    return 1 - NormalDist().cdf(normal)
