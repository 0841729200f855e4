"""The recent texts of one worker, by the scope of those who may be told them: bounded, the least recently used scope
goes first."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.memory.incremental_index import IncrementalIndex
from omnidraft.memory.match import SEPARATOR


@dataclass(frozen=True, slots=True, eq=False)
class MemoryText:
    """A segment of one answer."""

    tenant: str
    request: int
    """A hash of 63 bits of the request's id."""
    segment: int
    """0 for a request's first."""
    time_ms: int
    """When it was said, Unix milliseconds."""
    num_context: int
    """The number of ids at its beginning that come from before the segment. 0: it goes on where the segment before it
    ends, if that one is in the memory."""
    ids: np.ndarray
    """uint32, the target's."""


def joined(texts: Iterable[MemoryText]) -> list[list[MemoryText]]:
    """Return the segments of each answer together, in their order; answers stand in the order of their first one."""
    answers: list[list[MemoryText]] = []
    answer_before: dict[tuple[int, int], list[MemoryText]] = {}
    for text in texts:
        answer = None if text.num_context else answer_before.pop((text.request, text.segment - 1), None)
        if answer is None:
            answer = []
            answers.append(answer)
        answer.append(text)
        answer_before[text.request, text.segment] = answer
    return answers


_SCOPE_SHARE = 8
"""A scope holds at most this part of all ids."""
_IDS_PER_SCOPE, _MIN_SCOPES = 256, 64
"""A scope takes several kilobytes however short its texts are, so there is at most one for so many ids that may be
remembered, or the second number of them."""


RECENT_TOKENS = 524_288
"""Tokens of recent answers that a worker remembers, an eighth of them for one tenant at most; each takes 28 to 52
bytes, so all together some 20 MB. One tenant, or one of its `user`s or cache salts, is remembered for every 256."""


class RecentTexts:
    """Only the thread that decodes may use it. A text is drafted from in its own scope and in no other."""

    def __init__(self, max_ids: int = RECENT_TOKENS) -> None:
        """Remember at most `max_ids` ids of all scopes together; 0 remembers none."""
        self._max_ids = max_ids
        self._max_scopes = max(max_ids // _IDS_PER_SCOPE, _MIN_SCOPES)
        self._scopes: OrderedDict[Hashable, _ScopeTexts] = OrderedDict()
        self.num_ids = 0
        """The number of ids that are remembered, one separator a text included."""
        self.num_clears = 0
        """How often all texts were forgotten."""

    def add(self, scope: Hashable, text: Sequence[int]) -> None:
        """Remember a text that has ended; of a very long one its end."""
        half = self._max_ids // _SCOPE_SHARE // 2
        kept = text[-max(half - 1, 0) :] if half > 1 else ()
        if not kept:
            return
        texts = self._scopes.setdefault(scope, _ScopeTexts())
        self._scopes.move_to_end(scope)
        self.num_ids -= len(texts)
        texts.add(kept, half)
        self.num_ids += len(texts)
        while self.num_ids > self._max_ids or len(self._scopes) > self._max_scopes:
            self.num_ids -= len(self._scopes.popitem(last=False)[1])

    def of(self, scope: Hashable) -> Sequence[IncrementalIndex]:
        """Return the indexes over the texts of a scope, which counts as used; newest first."""
        if scope not in self._scopes:
            return ()
        self._scopes.move_to_end(scope)
        return self._scopes[scope].indexes

    def clear(self) -> None:
        """Forget all texts."""
        self._scopes.clear()
        self.num_ids = 0
        self.num_clears += 1


class _ScopeTexts:
    """The texts of one scope in two halves: when the newer one is full, the older one is dropped whole."""

    def __init__(self) -> None:
        self.indexes: tuple[IncrementalIndex, ...] = (IncrementalIndex(),)

    def __len__(self) -> int:
        return sum(len(index) for index in self.indexes)

    def add(self, text: Sequence[int], max_ids: int) -> None:
        if len(self.indexes[0]) + len(text) + 1 > max_ids:
            self.indexes = (IncrementalIndex(), self.indexes[0])
        self.indexes[0].append(text)
        self.indexes[0].append((SEPARATOR,))
