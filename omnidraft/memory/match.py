"""A place in remembered texts that ends like a running text, and what followed it there."""

from collections.abc import Mapping, Sequence
from itertools import islice

SEPARATOR = 2**32 - 1
"""Stands between remembered texts; no vocabulary has this id, so no match goes across it."""
MAX_OCCURRENCES = 128
"""The occurrences of a match that are read at most; of more, evenly spread ones stand for all."""


class SuffixMatch:
    """The end of a running text, found in a memory. It stays valid while the memory's ids are only appended to."""

    __slots__ = ("_followers", "_ids", "_next", "count", "length")

    def __init__(self, ids: Sequence[int], next_positions: Sequence[int], length: int, count: int) -> None:
        """Use these occurrences.

        Args:
            ids: the memory's ids.
            next_positions: the position after each occurrence that is read, oldest first, at most MAX_OCCURRENCES.
            length: the number of ids that match.
            count: the number of all occurrences, those that are not read included.
        """
        self.length = length
        self.count = count
        self._ids = ids
        self._next = next_positions
        self._followers: Mapping[int, Sequence[int]] | None = None

    def continuations(self, limit: int) -> list[tuple[int, int]]:
        """Return the ids that followed, each with the number of times, the most frequent and then the newest first;
        the numbers are exact where `count` is at most MAX_OCCURRENCES."""
        followers = islice(self._positions().items(), limit)
        return [(token, self._count(positions)) for token, positions in followers]

    def extend(self, token: int) -> "SuffixMatch | None":
        """Return the match of the text and this id; None where this id never followed."""
        positions = self._positions().get(token)
        if positions is None:
            return None
        return SuffixMatch(self._ids, positions, self.length + 1, self._count(positions))

    def _count(self, positions: Sequence[int]) -> int:
        """Return how many of all occurrences these stand for, which are among those that are read."""
        return round(self.count / len(self._next) * len(positions))

    def _positions(self) -> Mapping[int, Sequence[int]]:
        """Return the positions after each id that followed, in the order of `continuations`."""
        if self._followers is None:
            self._followers = self._only_follower() if len(self._next) == 1 else self._sorted_followers()
        return self._followers

    def _only_follower(self) -> Mapping[int, Sequence[int]]:
        """Return what follows a single occurrence, as most are, without sorting."""
        position = self._next[0]
        if position < len(self._ids) and (token := self._ids[position]) != SEPARATOR:
            return {token: (position + 1,)}
        return {}

    def _sorted_followers(self) -> Mapping[int, Sequence[int]]:
        end, next_positions = len(self._ids), dict[int, list[int]]()
        for position in self._next:
            if position < end and (token := self._ids[position]) != SEPARATOR:
                next_positions.setdefault(token, []).append(position + 1)
        if len(next_positions) < 2:
            return next_positions
        return dict(sorted(next_positions.items(), key=lambda follower: (-len(follower[1]), -follower[1][-1])))


def num_common(ids: bytes, others: bytes) -> int:
    """Return how many ids at the ends of two packed texts (uint32) are equal."""
    longest = min(len(ids), len(others))
    if not longest:
        return 0
    difference = int.from_bytes(ids[-longest:], "big") ^ int.from_bytes(others[-longest:], "big")
    return longest // 4 if not difference else ((difference & -difference).bit_length() - 1) // 32
