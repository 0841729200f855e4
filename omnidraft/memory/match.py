"""A place in remembered texts that ends like a running text, and what followed it there."""

from collections.abc import Iterable, Sequence

SEPARATOR = 2**32 - 1
"""Stands between remembered texts; no vocabulary has this id, so no match goes across it."""
MAX_OCCURRENCES = 128
"""The occurrences of a match that are read at most; of more, evenly spread ones stand for all."""


class SuffixMatch:
    """The end of a running text, found in a memory. It stays valid while the memory's ids are only appended to."""

    __slots__ = ("_children", "_ids", "_next", "count", "length")

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
        self._children: dict[int, SuffixMatch] | None = None

    def continuations(self, limit: int) -> list[tuple[int, int]]:
        """Return the ids that followed, each with the number of times, the most frequent and then the newest first;
        the numbers are exact where `count` is at most MAX_OCCURRENCES."""
        return [(token, match.count) for token, match in list(self._followers().items())[:limit]]

    def extend(self, token: int) -> "SuffixMatch | None":
        """Return the match of the text and this id; None where this id never followed."""
        return self._followers().get(token)

    def _followers(self) -> "dict[int, SuffixMatch]":
        if self._children is None:
            self._children = dict(self._sorted_followers())
        return self._children

    def _sorted_followers(self) -> "Iterable[tuple[int, SuffixMatch]]":
        if len(self._next) == 1:
            yield from self._only_follower(self._next[0])
            return
        end, next_positions = len(self._ids), dict[int, list[int]]()
        for position in self._next:
            if position < end and (token := self._ids[position]) != SEPARATOR:
                next_positions.setdefault(token, []).append(position + 1)
        share = self.count / max(len(self._next), 1)
        by_frequency = sorted(next_positions.items(), key=lambda follower: (-len(follower[1]), -follower[1][-1]))
        for token, positions in by_frequency:
            yield token, SuffixMatch(self._ids, positions, self.length + 1, round(share * len(positions)))

    def _only_follower(self, position: int) -> "Iterable[tuple[int, SuffixMatch]]":
        """Yield what follows a single occurrence, as most are, without sorting."""
        if position < len(self._ids) and (token := self._ids[position]) != SEPARATOR:
            yield token, SuffixMatch(self._ids, (position + 1,), self.length + 1, self.count)


def num_common(ids: bytes, others: bytes) -> int:
    """Return how many ids at the ends of two packed texts (uint32) are equal."""
    longest = min(len(ids), len(others))
    if not longest:
        return 0
    difference = int.from_bytes(ids[-longest:], "big") ^ int.from_bytes(others[-longest:], "big")
    return longest // 4 if not difference else ((difference & -difference).bit_length() - 1) // 32
