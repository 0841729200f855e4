"""A bounded table from 64-bit keys to target ids, in packed arrays: 24 bytes an entry.

Sorted arrays hold the entries; at most MAX_RECENT wait in a dict and are merged in together, so adding one costs a
small part of a copy. Equal histories give equal arrays. One thread at a time.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, Self

import numpy as np

Eviction = Literal["lru", "lfu"]

MAX_RECENT = 1024
ENTRY = np.dtype([("key", "<u8"), ("last_used", "<u8"), ("target", "<u4"), ("num_uses", "<u4")])
_MAX_USES = 2**32 - 1


class NgramTable:
    """Keys are spread evenly (hashes); what a key stands for, and whether it is right, the caller knows."""

    _keys: np.ndarray  # uint64, sorted; the others stand in the same order
    _last_used: np.ndarray
    _targets: np.ndarray
    _num_uses: np.ndarray

    def __init__(self, capacity: int, eviction: Eviction, entries: np.ndarray | None = None) -> None:
        self.capacity = capacity
        self.eviction = eviction
        self._max_recent = max(1, min(MAX_RECENT, capacity // 16))
        self._recent: dict[int, tuple[int, int, int]] = {}  # key -> last used, target, number of uses
        self._clock = 0
        self._replace_all(np.empty(0, ENTRY) if entries is None else entries)
        self._evict_down_to(capacity)

    def __len__(self) -> int:
        return len(self._keys) + len(self._recent)

    def entries(self) -> np.ndarray:
        """All of them, sorted by key; a copy."""
        self._flush()
        columns = (self._keys, self._last_used, self._targets, self._num_uses)
        return _table(len(self._keys), columns)

    def use(self, key: int) -> int | None:
        """The target id, and the entry counts as used."""
        recent = self._recent.get(key)
        if recent is not None:
            self._use_recent(key, recent[1])
            return recent[1]
        place = self._index_of(key)
        if place is None:
            return None
        self._use_stored(place)
        return self._targets.item(place)

    def contained(self, keys: Sequence[int]) -> list[int]:
        """Which of the keys are in the table, as indices into `keys`; nothing counts as used."""
        wanted = np.array(keys, np.uint64)
        places = np.minimum(self._keys.searchsorted(wanted), max(len(self._keys) - 1, 0))
        stored = (self._keys[places] == wanted).tolist() if len(self._keys) else [False] * len(keys)
        return [index for index, key in enumerate(keys) if stored[index] or key in self._recent]

    def add(self, key: int, target: int) -> bool:
        """True when the key is new; a known one takes this target and counts as used."""
        if key in self._recent:
            self._use_recent(key, target)
            return False
        place = self._index_of(key)
        if place is not None:
            self._targets[place] = target
            self._use_stored(place)
            return False
        self._evict_if_full()
        self._clock += 1
        self._recent[key] = (self._clock, target, 1)
        return True

    def add_all(self, keys: np.ndarray, targets: np.ndarray) -> int:
        """Unused entries for those keys that are new, first come first; returns how many of them are kept."""
        mine = self.entries()
        _, first = np.unique(keys, return_index=True)
        fresh = first[~np.isin(keys[first], mine["key"])]
        zeros = np.zeros(len(fresh), np.uint64)
        self._replace_all(np.concatenate([mine, _table(len(fresh), (keys[fresh], zeros, targets[fresh], zeros))]))
        self._evict_down_to(self.capacity)
        return int(np.isin(keys[fresh], self._keys).sum())

    def merge(self, other: Self) -> None:
        """Uses of common keys add up, the later use counts, this table's target stays; then it is bounded again."""
        mine, theirs = self.entries(), other.entries()
        common, at_mine, at_theirs = np.intersect1d(mine["key"], theirs["key"], return_indices=True)
        num_uses = mine["num_uses"][at_mine].astype(np.int64) + theirs["num_uses"][at_theirs]
        mine["num_uses"][at_mine] = np.minimum(num_uses, _MAX_USES)
        mine["last_used"][at_mine] = np.maximum(mine["last_used"][at_mine], theirs["last_used"][at_theirs])
        self._replace_all(np.concatenate([mine, theirs[~np.isin(theirs["key"], common)]]))
        self._evict_down_to(self.capacity)

    def _index_of(self, key: int) -> int | None:
        place = bisect_left(self._keys.data, key)  # faster than searchsorted for a single key
        return place if place < len(self._keys) and self._keys.item(place) == key else None

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
        places = self._keys.searchsorted(recent["key"])
        self._keys = np.insert(self._keys, places, recent["key"])
        self._last_used = np.insert(self._last_used, places, recent["last_used"])
        self._targets = np.insert(self._targets, places, recent["target"])
        self._num_uses = np.insert(self._num_uses, places, recent["num_uses"])
        self._recent = {}

    def _replace_all(self, entries: np.ndarray) -> None:
        """These in the place of all entries."""
        entries = entries[np.argsort(entries["key"], kind="stable")]
        self._keys = entries["key"].copy()
        self._last_used = entries["last_used"].copy()
        self._targets = entries["target"].copy()
        self._num_uses = entries["num_uses"].copy()
        self._clock = max(self._clock, int(entries["last_used"].max(initial=0)))

    def _evict_down_to(self, num_entries: int) -> None:
        """Drop the least used, or least recently used, of the sorted entries."""
        surplus = len(self._keys) - num_entries
        if surplus <= 0:
            return
        by_value = (self._keys, self._last_used, self._num_uses)  # lexsort: the last one counts most
        order = np.lexsort(by_value if self.eviction == "lfu" else by_value[:2])
        keep = np.sort(order[surplus:])
        self._keys, self._last_used = self._keys[keep], self._last_used[keep]
        self._targets, self._num_uses = self._targets[keep], self._num_uses[keep]


def _table(num_entries: int, columns: Sequence[np.ndarray]) -> np.ndarray:
    entries = np.empty(num_entries, ENTRY)
    for name, column in zip(ENTRY.names or (), columns, strict=True):
        entries[name] = column
    return entries
