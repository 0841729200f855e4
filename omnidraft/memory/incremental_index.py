"""An index over ids that are appended one by one, by hash chains as in zlib: 28 to 52 bytes an id.

For each of a few n-gram lengths a table holds the newest position behind an n-gram with some hash, and a chain leads
from each position to the one before it with the same hash. The longest match is the longest among the newest positions
of the chain of the longest n-gram that matches. Source: RFC 1951, section 4.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from omnidraft.memory.match import SuffixMatch, num_common

_ORDERS = (8, 4, 2)
"""Lengths of the n-grams that have chains, each half of the one before; shorter endings do not match."""
_MAX_CHAIN = 64
"""Positions of a chain that are looked at, the newest first."""
_MIN_CAPACITY = 256
_NONE = 2**32 - 1
_MAX_LENGTH = 64
_MULTIPLIER = 0x9E3779B97F4A7C15
"""The base of the hash, a polynomial modulo 2^64, which is the same in every process."""
_WEIGHTS = {order: pow(_MULTIPLIER, order // 2, 2**64) for order in _ORDERS}
"""Length of an n-gram -> the weight of its first half."""


class IncrementalIndex:
    """Indexes one growing sequence of ids. It is not thread-safe. Its matches are valid until the next `append`."""

    def __init__(self) -> None:
        self._ids = array("I")
        self._chains = {order: _Chain() for order in _ORDERS}
        self._capacity = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        """The ids appended so far; not to be changed."""
        return self._ids

    def append(self, ids: Sequence[int]) -> None:
        """Add ids at the end."""
        first_new = len(self._ids)
        self._ids.extend(ids)
        if len(self._ids) > self._capacity:
            self._capacity, first_new = max(2 * len(self._ids), _MIN_CAPACITY), 0
            for chain in self._chains.values():
                chain.reset(self._capacity)
        read_from = max(first_new - _ORDERS[0] + 1, 0)
        for order, hashes in _hashes(self._ids[read_from:]).items():
            skipped = max(first_new - read_from - order + 1, 0)
            self._chains[order].add(hashes[skipped:], read_from + order + skipped)

    def longest_match(self, context: Sequence[int], max_length: int = _MAX_LENGTH) -> SuffixMatch | None:
        """Return the longest end of the context, up to `max_length` ids, that stands before another id; None where
        no two ids match. It may miss longer ones that are older than 64 others with the same last ids."""
        ending = array("I", context[-max_length:])
        packed, ids = ending.tobytes(), memoryview(self._ids).cast("B")
        for order, last_hash in _last_hashes(ending[-_ORDERS[0] :]):
            length, longest = order, list[int]()
            for position in self._chains[order].newest(last_hash):
                behind = 4 * position
                if position >= len(self._ids) or ids[max(behind - 4 * length, 0) : behind] != packed[-4 * length :]:
                    continue  # shorter than another one
                common = num_common(packed, ids[max(behind - len(packed), 0) : behind].tobytes())
                if common > length:
                    length, longest = common, []
                longest.append(position)
            if longest:
                return SuffixMatch(self._ids, longest[::-1], length, len(longest))
        return None


class _Chain:
    """The positions behind the n-grams of one length, by their hash."""

    def __init__(self) -> None:
        self._newest = self._older = array("I")

    def reset(self, capacity: int) -> None:
        """Forget all positions, and make room for so many."""
        self._newest = array("I", [_NONE]) * capacity
        self._older = array("I", [_NONE]) * (capacity + 1)

    def add(self, hashes: np.ndarray, first_end: int) -> None:
        """Add the n-grams of these hashes, which end one after the other, the first before position `first_end`."""
        newest, older = self._newest, self._older
        for end, slot in enumerate((hashes % np.uint64(len(newest))).tolist(), first_end):
            older[end] = newest[slot]
            newest[slot] = end

    def newest(self, ngram_hash: int) -> Iterator[int]:
        """Yield the newest positions behind what may be the n-gram of this hash."""
        if not self._newest:
            return
        position = self._newest[ngram_hash % len(self._newest)]
        for _ in range(_MAX_CHAIN):
            if position == _NONE:
                return
            yield position
            position = self._older[position]


def _hashes(ids: array) -> dict[int, np.ndarray]:
    """Return the hashes of all n-grams by their length, the longest first; that of one is made of those of its
    halves."""
    hashes = {1: np.array(ids, np.uint64) + np.uint64(1)}
    for order in reversed(_ORDERS):
        half = order // 2
        shorter = hashes[half]
        hashes[order] = shorter[: max(len(shorter) - half, 0)] * np.uint64(_WEIGHTS[order]) + shorter[half:]
    return {order: hashes[order] ^ (hashes[order] >> np.uint64(32)) for order in _ORDERS}


def _last_hashes(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the length and the hash of the last n-grams of a few ids, the longest first, as `_hashes` does without the
    price of arrays."""
    hashes = {1: [token + 1 for token in ids]}
    for order in reversed(_ORDERS):
        weight, shorter = _WEIGHTS[order], hashes[order // 2]
        halves = zip(shorter, shorter[order // 2 :], strict=False)
        hashes[order] = [(left * weight + right) % 2**64 for left, right in halves]
    for order in _ORDERS:
        if hashes[order]:
            yield order, hashes[order][-1] ^ (hashes[order][-1] >> 32)
