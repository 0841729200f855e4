"""The sequences of an engine that passes token ids only, in any order: a sequence is known by its ids.

A sequence that continues has exactly the ids that it had in the round before. Two sequences of the same ids cannot be
told apart and need not be: a draft for one is right for the other.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from omnidraft.decode.drafting.safe_drafting import SafeSession
from omnidraft.decode.external.request_options import NO_OPTIONS, RequestOptions
from omnidraft.decode.recording.record_builder import TraceRecordBuilder
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.ports import DraftTree

KEEP_S = 60.0
"""The time for which a sequence that left the engine's batch is kept: it may have been preempted."""
_MAX_INACTIVE = 256
"""The inactive sequences that are held at most: as many as a large batch may preempt."""
_TAIL = 24
"""Ids at the end that stand for the whole sequence in the index; a match is then compared in full."""


class TokenBuffer:
    """The growing ids of one sequence."""

    def __init__(self, ids: np.ndarray) -> None:
        self._buffer = np.empty(max(2 * len(ids), 256), np.int32)
        self._buffer[: len(ids)] = ids
        self._num = len(ids)

    def __len__(self) -> int:
        return self._num

    @property
    def ids(self) -> np.ndarray:
        """int32; a view that the next `append` may leave stale."""
        return self._buffer[: self._num]

    def append(self, ids: Sequence[int]) -> None:
        """Append ids."""
        end = self._num + len(ids)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self.ids, np.empty(end, np.int32)])
        self._buffer[self._num : end] = ids
        self._num = end


@dataclass(slots=True, eq=False)
class ExternalSequence:
    """One running sequence."""

    tokens: TokenBuffer
    snapshot: LoadedSnapshot
    drafting: SafeSession
    record_builder: TraceRecordBuilder | None
    tree: DraftTree = field(default_factory=lambda: DraftTree.empty(0))
    """The draft that the engine received last and is scoring now."""
    options: RequestOptions = NO_OPTIONS


class SequenceTracker:
    """All sequences that an engine works on, and inactive ones that it may resume.

    An engine drops a sequence when it ends, when its client disconnects, or when it is preempted, and does not say
    which. So inactive sequences are held for a while, a bounded number of them.
    """

    def __init__(
        self,
        *,
        keep_s: float = KEEP_S,
        max_inactive: int = _MAX_INACTIVE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_s, self._max_inactive, self._clock = keep_s, max_inactive, clock
        self._index: dict[tuple[int, bytes], list[ExternalSequence]] = {}
        self._active: dict[ExternalSequence, None] = {}
        self._inactive: dict[ExternalSequence, float] = {}
        """Since when, in this order."""

    def __len__(self) -> int:
        return len(self._active) + len(self._inactive)

    def __iter__(self) -> Iterator[ExternalSequence]:
        yield from (*self._active, *self._inactive)

    def find(
        self, ids: np.ndarray, taken: Sequence[ExternalSequence | None], options: RequestOptions = NO_OPTIONS
    ) -> ExternalSequence | None:
        """Return the sequence that has exactly these ids and options and is not in `taken`."""
        for seq in self._index.get(_key(ids), ()):
            if seq not in taken and seq.options == options and np.array_equal(seq.tokens.ids, ids):
                return seq
        return None

    def add(self, seq: ExternalSequence) -> None:
        """Add a new sequence as active."""
        self._index.setdefault(_key(seq.tokens.ids), []).append(seq)
        self._active[seq] = None

    def append(self, seq: ExternalSequence, ids: Sequence[int]) -> None:
        """Append ids to a sequence and index it anew."""
        self._unindex(seq)
        seq.tokens.append(ids)
        self._index.setdefault(_key(seq.tokens.ids), []).append(seq)

    def set_active(self, seqs: Sequence[ExternalSequence]) -> list[ExternalSequence]:
        """Set the sequences that the engine works on; return those that became inactive."""
        before, self._active = self._active, dict.fromkeys(seqs)
        dropped = [seq for seq in before if seq not in self._active]
        for seq in seqs:
            self._inactive.pop(seq, None)
        self._inactive |= dict.fromkeys(dropped, self._clock())
        return dropped

    def evict(self) -> list[ExternalSequence]:
        """Remove and return the sequences that were inactive too long, or are too many."""
        now_s, evicted = self._clock(), []
        for seq, since_s in list(self._inactive.items()):
            if now_s - since_s < self._keep_s and len(self._inactive) <= self._max_inactive:
                break
            self.remove(seq)
            evicted.append(seq)
        return evicted

    def remove(self, seq: ExternalSequence) -> None:
        """Remove a sequence that has ended."""
        self._active.pop(seq, None)
        self._inactive.pop(seq, None)
        self._unindex(seq)

    def clear(self) -> list[ExternalSequence]:
        """Remove and return all sequences."""
        removed = list(self)
        self._index, self._active, self._inactive = {}, {}, {}
        return removed

    def _unindex(self, seq: ExternalSequence) -> None:
        key = _key(seq.tokens.ids)
        same = [each for each in self._index.pop(key, ()) if each is not seq]
        if same:
            self._index[key] = same


def _key(ids: np.ndarray) -> tuple[int, bytes]:
    return len(ids), ids[-_TAIL:].astype(np.int32).tobytes()
