"""The standard error of a change in agreement that was measured on the same records before and after."""

from collections import defaultdict
from collections.abc import Iterable
from math import sqrt

import numpy as np


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
