"""How sure a change of agreement is, when both snapshots were measured on the same records."""

from collections import defaultdict
from collections.abc import Iterable
from math import sqrt

import numpy as np


def paired_standard_error(pairs: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> float | None:
    """Standard error of the change in agreement, positions of one request taken as one draw.

    The linearised error of a ratio of sums over clusters; Cochran, Sampling Techniques (1977), section 9A.

    Args:
        pairs: request id, and which positions [P] agree before and after, bool, for every record.

    Returns:
        None with fewer than two requests that have a position.
    """
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for request_id, before_P, after_P in pairs:
        sums[request_id][0] += int(after_P.sum()) - int(before_P.sum())
        sums[request_id][1] += len(after_P)
    clusters = [(gained, scored) for gained, scored in sums.values() if scored]
    if len(clusters) < 2:
        return None
    scored = sum(number for _, number in clusters)
    change = sum(gained for gained, _ in clusters) / scored
    residual = sum((gained - change * number) ** 2 for gained, number in clusters)
    return sqrt(len(clusters) / (len(clusters) - 1) * residual) / scored
