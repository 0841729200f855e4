"""A bounded table from 64-bit keys to target ids, in packed arrays: 24 bytes an entry.

A sorted array holds the entries; up to MAX_RECENT new ones wait in a dict and are merged in together, so that adding
one costs a small part of a copy. Equal histories give equal arrays. The table is not thread-safe.
"""

from bisect import bisect_left

import numpy as np

MAX_RECENT = 1024
ENTRY = np.dtype([("key", "<u8"), ("last_used", "<u8"), ("target", "<u4"), ("num_uses", "<u4")])
_MAX_USES = 2**32 - 1


class NgramTable:
    """A bounded table of evenly spread keys (hashes); the caller knows their meaning and checks entries."""

    def __init__(self, capacity: int, entries: np.ndarray | None = None) -> None:
        self.capacity = capacity
        self._max_recent = max(1, min(MAX_RECENT, capacity // 16))
        self._recent: dict[int, tuple[int, int, int, int]] = {}
        self._stored = np.sort(np.empty(0, ENTRY) if entries is None else entries, order="key")
        self._clock = int(self._stored["last_used"].max(initial=0))
        self._evict_down_to(capacity)

    def __len__(self) -> int:
        return len(self._stored) + len(self._recent)

    def entries(self) -> np.ndarray:
        """Return a copy of all entries, sorted by key."""
        self._flush()
        return self._stored.copy()

    def find(self, key: int) -> int | None:
        """Return the target id of a key, or None; nothing changes."""
        found = self._find(key)
        return None if found is None else found[1][2]

    def use(self, key: int) -> int | None:
        """Return the target id of a key, or None; the entry counts as used."""
        if (found := self._find(key)) is None:
            return None
        self._count_use(found[0], found[1])
        return found[1][2]

    def add(self, key: int, target: int) -> bool:
        """Set the target of a key and count a use; return whether the key is new."""
        found = self._find(key)
        if found is None:
            self._evict_if_full()
            self._count_use(None, (key, 0, target, 0))
        else:
            self._count_use(found[0], (key, 0, target, found[1][3]))
        return found is None

    def _count_use(self, index: int | None, entry: tuple[int, int, int, int]) -> None:
        self._clock += 1
        key, _, target, num_uses = entry
        used = (key, self._clock, target, min(num_uses + 1, _MAX_USES))
        if index is None:
            self._recent[key] = used
        else:
            self._stored[index] = used

    def _find(self, key: int) -> tuple[int | None, tuple[int, int, int, int]] | None:
        """Return the place and the entry of a key; a recent one has no place."""
        if (recent := self._recent.get(key)) is not None:
            return None, recent
        index = bisect_left(self._keys, key)  # faster than searchsorted for a single key
        if index == len(self._stored) or self._keys[index] != key:
            return None
        return index, self._stored[index].item()

    def _evict_if_full(self) -> None:
        if len(self) >= self.capacity:
            self._flush()
            self._evict_down_to(self.capacity - self._max_recent)
        elif len(self._recent) == self._max_recent:
            self._flush()

    def _flush(self) -> None:
        recent = np.array(sorted(self._recent.values()), ENTRY)
        self._replace(np.insert(self._stored, self._stored["key"].searchsorted(recent["key"]), recent))
        self._recent = {}

    def _evict_down_to(self, num_entries: int) -> None:
        """Keep at most `num_entries` of the sorted entries: drop the least used, of those the earliest used."""
        surplus = max(len(self._stored) - num_entries, 0)
        order = np.lexsort([self._stored[name] for name in ("key", "last_used", "num_uses")])  # the last counts most
        self._replace(self._stored[np.sort(order[surplus:])])

    def _replace(self, stored: np.ndarray) -> None:
        self._stored, self._keys = stored, stored["key"].data
