"""The beginning that two texts have in common, whose keys one can take over from the other."""

from collections.abc import Sequence


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the number of leading ids, or characters, that both have."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if list(left[low:middle]) == list(right[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
