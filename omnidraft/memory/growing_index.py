"""An index over ids that are appended one by one, by hash chains as in zlib: 28 to 84 bytes an id.

For each of a few n-gram lengths a table holds the newest position behind an n-gram with some hash, and a chain leads
from each position to the one before it with the same hash. The longest match is the longest among the newest positions
of the chain of the longest n-gram that matches. Source: RFC 1951, section 4.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from omnidraft.memory.match import SuffixMatch, num_common

_ORDERS = (8, 4, 2)
"""Lengths of the n-grams that have chains; shorter endings do not match."""
_MAX_CHAIN = 64
"""Positions of a chain that are looked at, the newest first."""
_MIN_CAPACITY = 256
_NONE = 2**32 - 1
_MAX_LENGTH = 64


class GrowingIndex:
    """Not thread-safe. Its matches are valid until the next `append`."""

    def __init__(self) -> None:
        self._ids = array("I")
        self._chains = [_Chain(order) for order in _ORDERS]
        self._capacity = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        """The ids appended so far; not to be changed."""
        return self._ids

    def append(self, ids: Iterable[int]) -> None:
        """Add ids at the end."""
        for token in ids:
            self._ids.append(token)
            if len(self._ids) > self._capacity:
                self._grow()
            for chain in self._chains:
                chain.add(self._ids, len(self._ids))

    def longest_match(self, context: Sequence[int], max_length: int = _MAX_LENGTH) -> SuffixMatch | None:
        """Return the longest end of the context, up to `max_length` ids, that stands before another id; None where
        no two ids match. It may miss longer ones that are older than 64 others with the same last ids."""
        ending = array("I", context[-max_length:])
        packed, ids = ending.tobytes(), memoryview(self._ids).cast("B")
        for chain in self._chains:
            matches = [
                (num_common(packed, ids[max(4 * position - len(packed), 0) : 4 * position].tobytes()), position)
                for position in chain.newest(ending)
                if position < len(self._ids)
            ]
            length = max((length for length, _ in matches), default=0)
            if length >= chain.order:
                longest = sorted(position for each, position in matches if each == length)
                return SuffixMatch(self._ids, longest, length, len(longest))
        return None

    def _grow(self) -> None:
        self._capacity = max(2 * self._capacity, _MIN_CAPACITY)
        for chain in self._chains:
            chain.reset(self._capacity)
            for end in range(1, len(self._ids)):
                chain.add(self._ids, end)


class _Chain:
    """The positions behind the n-grams of one length, by their hash."""

    def __init__(self, order: int) -> None:
        self.order = order
        self._newest = self._older = array("I")

    def reset(self, capacity: int) -> None:
        """Forget all positions, and make room for so many."""
        self._newest = array("I", [_NONE]) * capacity
        self._older = array("I", [_NONE]) * (capacity + 1)

    def add(self, ids: array, end: int) -> None:
        """Add the n-gram that ends before position `end`."""
        if end >= self.order:
            slot = hash(tuple(ids[end - self.order : end])) % len(self._newest)
            self._older[end] = self._newest[slot]
            self._newest[slot] = end

    def newest(self, ending: array) -> Iterator[int]:
        """Yield the newest positions behind what may be the last ids of `ending`."""
        if len(ending) < self.order or not self._newest:
            return
        position = self._newest[hash(tuple(ending[-self.order :])) % len(self._newest)]
        for _ in range(_MAX_CHAIN):
            if position == _NONE:
                return
            yield position
            position = self._older[position]
