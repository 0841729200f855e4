"""Which text is which, when an engine tells only the ids of each and moves them about: a text is known by its ids.

A text that the engine had so far and that goes on has exactly the ids that it had. Two texts of the same ids cannot be
told apart and need not be: what is drafted for one is right for the other.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

_TAIL = 24
"""Ids at the end that stand for all of a text in the index; the others are compared when it is found."""


class TokenBuffer:
    """The ids of one text, which grow."""

    def __init__(self, ids: np.ndarray) -> None:
        self._buffer = np.empty(max(2 * len(ids), 256), np.int32)
        self._buffer[: len(ids)] = ids
        self._num = len(ids)

    def __len__(self) -> int:
        return self._num

    @property
    def ids(self) -> np.ndarray:
        """int32; a view that the next `append` may leave behind."""
        return self._buffer[: self._num]

    def append(self, ids: Sequence[int]) -> None:
        """The text goes on."""
        end = self._num + len(ids)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self.ids, np.empty(end, np.int32)])
        self._buffer[self._num : end] = ids
        self._num = end


class TrackedSequence(Protocol):
    """What is kept of a text."""

    tokens: TokenBuffer


Kept = TypeVar("Kept", bound=TrackedSequence)


class SequenceTracker(Generic[Kept]):
    """All texts that an engine works on, and those that it left a while ago and may come back to.

    An engine leaves a text when it is over, when its client went away, when it has no memory or no turn for it: it does
    not say which. So what was left is kept for a while, a bounded number of texts.
    """

    def __init__(self, *, keep_s: float, most_left: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._most_left = most_left
        self._clock = clock
        self._index: dict[tuple[int, bytes], list[Kept]] = {}
        self._here: dict[int, Kept] = {}
        self._left: dict[int, tuple[Kept, float]] = {}  # the one that was left first comes first

    def __len__(self) -> int:
        return len(self._here) + len(self._left)

    def __iter__(self) -> Iterator[Kept]:
        yield from self._here.values()
        yield from self.left

    @property
    def left(self) -> list[Kept]:
        """Those that the engine does not work on, the one that was left first comes first."""
        return [kept for kept, _ in self._left.values()]

    def find(self, ids: np.ndarray, taken: Iterable[Kept]) -> Kept | None:
        """The text that has exactly these ids and is not among those taken."""
        others = {id(each) for each in taken}
        for kept in self._index.get(_key(ids), ()):
            if id(kept) not in others and np.array_equal(kept.tokens.ids, ids):
                return kept
        return None

    def add(self, kept: Kept) -> None:
        """A text that is new."""
        self._index.setdefault(_key(kept.tokens.ids), []).append(kept)
        self._here[id(kept)] = kept

    def append(self, kept: Kept, ids: Sequence[int]) -> None:
        """It goes on with these."""
        self._unindex(kept)
        kept.tokens.append(ids)
        self._index.setdefault(_key(kept.tokens.ids), []).append(kept)

    def here(self, working_on: Sequence[Kept]) -> list[Kept]:
        """The engine works on these and no others; returns those that it left since it was last asked."""
        now = self._clock()
        still = {id(kept): kept for kept in working_on}
        gone = [kept for number, kept in self._here.items() if number not in still]
        for number in still:
            self._left.pop(number, None)
        self._here = still
        self._left |= {id(kept): (kept, now) for kept in gone}
        return gone

    def forgotten(self) -> list[Kept]:
        """Those that were left too long ago, or are too many; they are forgotten now."""
        now, given_up = self._clock(), []
        for number, (kept, since) in list(self._left.items()):
            if now - since < self._keep_s and len(self._left) <= self._most_left:
                break
            del self._left[number]
            self._unindex(kept)
            given_up.append(kept)
        return given_up

    def forget(self, kept: Kept) -> None:
        """It is over for good."""
        self._here.pop(id(kept), None)
        self._left.pop(id(kept), None)
        self._unindex(kept)

    def forget_all(self) -> list[Kept]:
        """Those that were followed; none is any more."""
        forgotten = list(self)
        self._index, self._here, self._left = {}, {}, {}
        return forgotten

    def _unindex(self, kept: Kept) -> None:
        key = _key(kept.tokens.ids)
        same = [each for each in self._index.pop(key, ()) if each is not kept]
        if same:
            self._index[key] = same


def _key(ids: np.ndarray) -> tuple[int, bytes]:
    return len(ids), ids[-_TAIL:].astype(np.int32).tobytes()
