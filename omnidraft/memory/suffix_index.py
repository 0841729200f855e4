"""An immutable index over remembered texts in two flat arrays, 8 bytes a token, that can be mapped from a file.

It is a suffix array of the texts read backwards: positions sorted by the ids before them, the nearest id first, so that
one binary search finds the longest end of a running text, and what followed it stands at the position itself.
Source: SuffixDecoding, https://arxiv.org/abs/2411.04975; prefix doubling is that of Manber and Myers (1990).
The suffix tree of arctic-inference 0.3 (Apache-2.0, C++) is not used: its nodes are pointers inside one process, which
no file holds and no worker maps, and its package builds against one version each of torch, grpcio and nanobind.
pydivsufsort sorts bytes, needs four suffixes a token for that, and no sort is the bottleneck here.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from omnidraft.errors import SnapshotCorrupt
from omnidraft.memory.match import MAX_OCCURRENCES, SEPARATOR, SuffixMatch, num_common

MAX_LENGTH = 64
"""Ids before a position that the order depends on; positions that are equal in all of them stand oldest first."""
_ID = np.dtype("<u4")
_ARRAYS = ("ids", "order")


class SuffixIndex:
    """The texts of one memory. Any number of threads may read it."""

    def __init__(self, ids: np.ndarray, order: np.ndarray) -> None:
        """Use these arrays without a copy; see `build` and `from_arrays`."""
        self._arrays = {"ids": ids, "order": order}
        self._ids = ids.data
        self._bytes = ids.data.cast("B") if len(ids) else memoryview(b"")
        self._order = order.data

    @staticmethod
    def build(texts: Sequence[Sequence[int]]) -> "SuffixIndex":
        """Index these texts, oldest first; equal texts give equal arrays."""
        parts = [part for text in texts for part in (np.asarray(text, _ID), np.array([SEPARATOR], _ID))]
        ids = np.concatenate(parts) if parts else np.empty(0, _ID)
        return SuffixIndex(ids, _sorted_positions(ids)[: len(ids) - len(texts)])

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray]) -> "SuffixIndex":
        """Use the arrays of `to_arrays`, mapped or in memory, without a copy. Their values are checked on use: wrong
        ones give wrong matches and nothing worse.

        Raises:
            SnapshotCorrupt: an array is missing, or is not one of an index.
        """
        for name in _ARRAYS:
            values = arrays.get(name)
            if values is None or values.dtype != _ID or values.ndim != 1 or not values.flags.c_contiguous:
                raise SnapshotCorrupt(f"suffix memory: {name} is no contiguous column of uint32")
        ids, order = (arrays[name] for name in _ARRAYS)
        if len(order) > len(ids):
            raise SnapshotCorrupt(f"suffix memory: order has {len(order)} values for {len(ids)} ids")
        return SuffixIndex(ids, order)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name, without a copy."""
        return dict(self._arrays)

    def __len__(self) -> int:
        """Return the number of ids, one separator a text included."""
        return len(self._ids)

    def longest_match(self, context: Sequence[int], max_length: int = MAX_LENGTH) -> SuffixMatch | None:
        """Return the longest end of the context, up to `max_length` ids, that the texts contain."""
        ending = array("I", context[-min(max_length, MAX_LENGTH) :]).tobytes()
        if not ending or not self._order:
            return None
        before = self._key(len(ending))
        at = bisect_left(self._order, ending[::-1], key=before)
        near = self._order[max(at - 1, 0) : at + 1]
        size = 4 * max(num_common(ending, before(position)[::-1]) for position in near)
        return self._match(ending[-size:], at) if size else None

    def _key(self, size: int) -> Callable[[int], bytes]:
        """Return a function from a position to the ids before it, up to so many bytes, the nearest first: bytes,
        which compare fast, and stand in the order that `build` sorts them in."""
        ids = self._bytes

        def before(position: int) -> bytes:
            end = 4 * position
            return ids[end - size if end > size else 0 : end].tobytes()[::-1]

        return before

    def _match(self, ending: bytes, near: int) -> SuffixMatch:
        """Return the match of an ending that stands beside a place of the order."""
        reverse, before, order = ending[::-1], self._key(len(ending)), self._order
        low, high = _bounds(lambda at: before(order[at]) == reverse, near, len(order))
        first = bisect_left(order, reverse, low, near, key=before)
        behind = bisect_right(order, reverse, near, high, key=before)
        count = behind - first
        spread = range(count) if count <= MAX_OCCURRENCES else _evenly_spread(count)
        return SuffixMatch(self._ids, sorted(order[first + each] for each in spread), len(ending) // 4, count)


def _bounds(is_equal: Callable[[int], bool], near: int, end: int) -> tuple[int, int]:
    """Return places between which all equal ones stand, by steps that double: they are few as a rule."""
    low, high, step = near, near, 1
    while low > 0 and is_equal(low - 1):
        low, step = max(low - step, 0), 2 * step
    step = 1
    while high < end and is_equal(high):
        high, step = min(high + step, end), 2 * step
    return low, high


def _evenly_spread(count: int) -> list[int]:
    return [each * count // MAX_OCCURRENCES for each in range(MAX_OCCURRENCES)]


def _sorted_positions(ids: np.ndarray) -> np.ndarray:
    """Return the positions 1 to n by the MAX_LENGTH ids before each, the nearest first, by prefix doubling."""
    order = np.argsort(ids, kind="stable").astype(_ID)
    is_new = np.ones(len(ids), bool)
    is_new[1:] = ids[order[1:]] != ids[order[:-1]]
    rank = np.empty(len(ids), _ID)
    slots = np.arange(len(ids), dtype=_ID)
    rank[order] = _starts(slots, is_new)
    length = 1
    while length < MAX_LENGTH and len(slots):
        is_tied = ~(is_new & np.append(is_new[1:], True))
        slots, is_new = slots[is_tied], is_new[is_tied]
        step = min(length, MAX_LENGTH - length)
        is_new = _refine(order, rank, slots, step)
        length += step
    return order + _ID.type(1)


def _refine(order: np.ndarray, rank: np.ndarray, slots: np.ndarray, step: int) -> np.ndarray:
    """Sort the positions in these slots by their rank and that of `step` ids before; return where a rank begins."""
    tied = order[slots]
    has_before = tied >= step
    keys = rank[tied].astype(np.uint64) << np.uint64(32)
    keys[has_before] += rank[tied[has_before] - _ID.type(step)].astype(np.uint64) + np.uint64(1)
    by_key = np.argsort(keys, kind="stable")
    order[slots], keys = tied[by_key], keys[by_key]
    is_new = np.ones(len(slots), bool)
    is_new[1:] = keys[1:] != keys[:-1]
    rank[order[slots]] = _starts(slots, is_new)
    return is_new


def _starts(slots: np.ndarray, is_new: np.ndarray) -> np.ndarray:
    """Return for each slot the first one of its rank."""
    return np.maximum.accumulate(np.where(is_new, slots, 0)).astype(_ID)
