"""The recent texts of one worker, by the scope of those who may be told them: bounded, the least recently used scope
goes first."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from omnidraft.memory.growing_index import GrowingIndex
from omnidraft.memory.match import SEPARATOR

_SCOPE_SHARE = 8
"""A scope holds at most this part of all ids."""


class RecentTexts:
    """Only the thread that decodes may use it. A text is drafted from in its own scope and in no other."""

    def __init__(self, max_ids: int) -> None:
        """Remember at most `max_ids` ids of all scopes together; 0 remembers none."""
        self._max_ids = max_ids
        self._scopes: OrderedDict[Hashable, _ScopeTexts] = OrderedDict()

    @property
    def num_ids(self) -> int:
        """The number of ids that are remembered, one separator a text included."""
        return sum(len(texts) for texts in self._scopes.values())

    def add(self, scope: Hashable, text: Sequence[int]) -> None:
        """Remember a text that has ended; of a very long one its end."""
        half = self._max_ids // _SCOPE_SHARE // 2
        kept = text[-max(half - 1, 0) :] if half > 1 else ()
        if not kept:
            return
        self._scopes.setdefault(scope, _ScopeTexts()).add(kept, half)
        self._scopes.move_to_end(scope)
        while self.num_ids > self._max_ids:
            self._scopes.popitem(last=False)

    def of(self, scope: Hashable) -> Sequence[GrowingIndex]:
        """Return the indexes over the texts of a scope, which counts as used; newest first."""
        if scope not in self._scopes:
            return ()
        self._scopes.move_to_end(scope)
        return self._scopes[scope].indexes

    def clear(self) -> None:
        """Forget all texts."""
        self._scopes.clear()


class _ScopeTexts:
    """The texts of one scope in two halves: when the newer one is full, the older one is dropped whole."""

    def __init__(self) -> None:
        self.indexes: tuple[GrowingIndex, ...] = (GrowingIndex(),)

    def __len__(self) -> int:
        return sum(len(index) for index in self.indexes)

    def add(self, text: Sequence[int], max_ids: int) -> None:
        if len(self.indexes[0]) + len(text) + 1 > max_ids:
            self.indexes = (GrowingIndex(), self.indexes[0])
        self.indexes[0].append(text)
        self.indexes[0].append((SEPARATOR,))
