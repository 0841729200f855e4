"""Many short lists of ids, packed into two arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class PackedLists:
    """List i is ids[offsets[i]:offsets[i + 1]]."""

    offsets: np.ndarray  # int64, one more than there are lists
    ids: np.ndarray  # int32

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Self:
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=offsets[1:])
        flat = (item for each in lists for item in each)
        return cls(offsets, np.fromiter(flat, np.int32, int(offsets[-1])))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.ids[self.offsets[index] : self.offsets[index + 1]].tolist())

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def firsts(self, default: int) -> np.ndarray:
        """Return the first id of each list as int64, `default` for an empty one."""
        firsts = np.full(len(self), default, np.int64)
        filled = self.lengths > 0
        firsts[filled] = self.ids[self.offsets[:-1][filled]]
        return firsts
