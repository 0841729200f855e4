"""A bounded table from 64-bit keys to target ids, in packed arrays: 24 bytes an entry.

Sorted arrays hold the entries; up to MAX_RECENT new ones wait in a dict and are merged in together, so that adding one
costs a small part of a copy. Equal histories give equal arrays. The table is not thread-safe.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

MAX_RECENT = 1024
ENTRY = np.dtype([("key", "<u8"), ("last_used", "<u8"), ("target", "<u4"), ("num_uses", "<u4")])
_MAX_USES = 2**32 - 1


class NgramTable:
    """A bounded table of evenly spread keys (hashes); the caller knows their meaning and checks entries."""

    _keys: np.ndarray  # uint64, sorted; the others stand in the same order
    _last_used: np.ndarray
    _targets: np.ndarray
    _num_uses: np.ndarray

    def __init__(self, capacity: int, entries: np.ndarray | None = None) -> None:
        self.capacity = capacity
        self._max_recent = max(1, min(MAX_RECENT, capacity // 16))
        self._recent: dict[int, tuple[int, int, int]] = {}  # key -> last used, target, number of uses
        self._clock = 0
        self._replace_all(np.empty(0, ENTRY) if entries is None else entries)
        self._evict_down_to(capacity)

    def __len__(self) -> int:
        return len(self._keys) + len(self._recent)

    def entries(self) -> np.ndarray:
        """Return a copy of all entries, sorted by key."""
        self._flush()
        columns = (self._keys, self._last_used, self._targets, self._num_uses)
        return _table(len(self._keys), columns)

    def find(self, key: int) -> int | None:
        """Return the target id of a key, or None; nothing changes."""
        recent = self._recent.get(key)
        if recent is not None:
            return recent[1]
        index = self._index_of(key)
        return None if index is None else self._targets.item(index)

    def use(self, key: int) -> int | None:
        """Return the target id of a key, or None; the entry counts as used."""
        recent = self._recent.get(key)
        if recent is not None:
            self._use_recent(key, recent[1])
            return recent[1]
        index = self._index_of(key)
        if index is None:
            return None
        self._use_stored(index)
        return self._targets.item(index)

    def add(self, key: int, target: int) -> bool:
        """Set the target of a key and count a use; return whether the key is new."""
        if key in self._recent:
            self._use_recent(key, target)
            return False
        index = self._index_of(key)
        if index is not None:
            self._targets[index] = target
            self._use_stored(index)
            return False
        self._evict_if_full()
        self._clock += 1
        self._recent[key] = (self._clock, target, 1)
        return True

    def _index_of(self, key: int) -> int | None:
        index = bisect_left(self._keys.data, key)  # faster than searchsorted for a single key
        return index if index < len(self._keys) and self._keys.item(index) == key else None

    def _use_stored(self, index: int) -> None:
        self._clock += 1
        self._last_used[index] = self._clock
        self._num_uses[index] = min(self._num_uses.item(index) + 1, _MAX_USES)

    def _use_recent(self, key: int, target: int) -> None:
        self._clock += 1
        num_uses = self._recent[key][2]
        self._recent[key] = (self._clock, target, min(num_uses + 1, _MAX_USES))

    def _evict_if_full(self) -> None:
        if len(self) >= self.capacity:
            self._flush()
            self._evict_down_to(self.capacity - self._max_recent)
        elif len(self._recent) == self._max_recent:
            self._flush()

    def _flush(self) -> None:
        if not self._recent:
            return
        ordered = sorted(self._recent)
        recent = np.array([(key, *self._recent[key]) for key in ordered], ENTRY)
        indices = self._keys.searchsorted(recent["key"])
        self._keys = np.insert(self._keys, indices, recent["key"])
        self._last_used = np.insert(self._last_used, indices, recent["last_used"])
        self._targets = np.insert(self._targets, indices, recent["target"])
        self._num_uses = np.insert(self._num_uses, indices, recent["num_uses"])
        self._recent = {}

    def _replace_all(self, entries: np.ndarray) -> None:
        """Replace all entries by these."""
        entries = entries[np.argsort(entries["key"], kind="stable")]
        self._keys = entries["key"].copy()
        self._last_used = entries["last_used"].copy()
        self._targets = entries["target"].copy()
        self._num_uses = entries["num_uses"].copy()
        self._clock = max(self._clock, int(entries["last_used"].max(initial=0)))

    def _evict_down_to(self, num_entries: int) -> None:
        """Keep at most `num_entries` of the sorted entries: drop the least used, of those the earliest used."""
        surplus = len(self._keys) - num_entries
        if surplus <= 0:
            return
        order = np.lexsort((self._keys, self._last_used, self._num_uses))  # the last one counts most
        keep = np.sort(order[surplus:])
        self._keys, self._last_used = self._keys[keep], self._last_used[keep]
        self._targets, self._num_uses = self._targets[keep], self._num_uses[keep]


def _table(num_entries: int, columns: Sequence[np.ndarray]) -> np.ndarray:
    entries = np.empty(num_entries, ENTRY)
    for name, column in zip(ENTRY.names or (), columns, strict=True):
        entries[name] = column
    return entries
