"""From partitions to batches: which record is learned when, which is held out, which was there before.

Rule: partitions take turns in the order of their numbers, one record each. A partition without a record at its turn
is waited for, unless the log is drained (a poll gave nothing) or the partitions that do have records are
LOOKAHEAD ahead; then it is passed over. So, while every partition has records waiting, batches are a function of the
log alone, however polls fell. Where one is idle, how partitions interleave depends on time; that each record is
learned once does not.
A partition that is added to the topic while this runs is buffered from its first message on, and takes its turns from
the next snapshot on (`admit`). A run that resumes from the snapshot before does the same, so both make the same
batches. It does not wait for a snapshot where the others are idle or a buffer is full.
A batch is taken whole or not at all, so what is not learned yet is exactly what still lies in the buffers.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.ingest.record_disposition import Disposition, disposition, forget_oldest, is_held_out, record_key
from omnidraft.distill.ingest.record_tensors import of_tensors, to_tensors
from omnidraft.distill.ingest.trace_consumer import PolledRecords, RecordAt, Skipped
from omnidraft.ports import Offsets
from omnidraft.traces.record import TraceRecord

LOOKAHEAD = 1024
"""Records buffered per partition at most, about 25 kB each."""

_SEEN, _TURN, _ORDER, _HELD_OUT = "seen", "turn", "partitions", "held_out."


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one step."""

    records: tuple[TraceRecord, ...]
    places: tuple[tuple[int, int], ...]
    """(partition, offset) of each record."""
    poison: tuple[RecordAt, ...]
    """Those to be dead-lettered instead."""
    held_out: tuple[RecordAt, ...]
    num_duplicates: int


@dataclass(slots=True)
class _Draft:
    """A batch in the making; nothing of it counts before it is full."""

    turn: int
    records: list[TraceRecord] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    poison: list[RecordAt] = field(default_factory=list)
    held_out: list[RecordAt] = field(default_factory=list)
    seen: dict[int, None] = field(default_factory=dict)
    num_duplicates: int = 0
    taken: dict[int, int] = field(default_factory=dict)


class Batcher:
    """Buffers of all partitions, and the memory of what went through."""

    def __init__(
        self,
        partitions: Iterable[int],
        *,
        records_per_step: int,
        held_out_every: int,
        held_out_records: int,
        poison: Container[tuple[int, int]] = frozenset(),
    ) -> None:
        """
        Args:
            held_out_every: 0 holds none out. Decided by a hash of the request id, so segments stay together.
            held_out_records: kept, newest win.
            poison: places of records that nobody may learn from.
        """
        self._order = tuple(sorted(partitions))
        """Those that take turns."""
        self._buffers: defaultdict[int, deque[tuple[int, TraceRecord]]] = defaultdict(deque)
        self._next_offsets: dict[int, int] = {}
        self._skipped: list[Skipped] = []
        self._records_per_step, self._held_out_every = records_per_step, held_out_every
        self._poison = poison
        self._turn = 0
        self._seen: dict[int, None] = {}
        self.held_out: deque[TraceRecord] = deque(maxlen=held_out_records)

    @property
    def has_room(self) -> bool:
        """Whether another poll is welcome."""
        return all(len(buffer) < LOOKAHEAD for buffer in self._buffers.values())

    def add(self, polled: PolledRecords) -> None:
        """What a poll gave, in offset order within each partition."""
        for partition, offset, record in polled.records:
            self._buffers[partition].append((offset, record))
        self._skipped += polled.skipped
        self._next_offsets |= polled.next_offsets

    def take(self, *, is_drained: bool) -> Batch | None:
        """A full batch, or None until more is polled.

        Args:
            is_drained: the last poll gave nothing, so nobody need be waited for.
        """
        may_pass_over = is_drained or not self.has_room
        if may_pass_over:
            self.admit()
        draft = _Draft(turn=self._turn)
        while len(draft.records) < self._records_per_step:
            partition = self._whose_turn(draft, may_pass_over)
            if partition is None:
                return None
            self._consider(draft, partition)
        return self._commit(draft)

    def admit(self) -> None:
        """From now on partitions that were added take turns too."""
        self._order = tuple(sorted({*self._order, *self._buffers}))

    def offsets(self) -> dict[int, int]:
        """Where to read on: everything before is learned, held out, a duplicate or skipped by the source."""
        waiting = {partition: buffer[0][0] for partition, buffer in self._buffers.items() if buffer}
        return self._next_offsets | waiting

    @property
    def read_to(self) -> Offsets:
        """Where the source stands."""
        return dict(self._next_offsets)

    def take_skipped(self) -> Counter[str]:
        """Reason -> number of messages that were skipped and `offsets` is past by now; each is told once."""
        offsets = self.offsets()
        passed = [each for each in self._skipped if each[1] < offsets[each[0]]]
        self._skipped = [each for each in self._skipped if each[1] >= offsets[each[0]]]
        counts = Counter[str]()
        for _, _, reason, number in passed:
            counts[reason] += number
        return counts

    def state(self) -> dict[str, Tensor]:
        """What goes into the snapshot beside the offsets."""
        tensors = {
            _SEEN: torch.from_numpy(np.array(list(self._seen), np.int64)),
            _TURN: torch.tensor(self._turn),
            _ORDER: torch.tensor(self._order),
        }
        return tensors | to_tensors(_HELD_OUT, self.held_out)

    def load_state(self, tensors: Mapping[str, Tensor], offsets: Offsets) -> None:
        """Go on where `state` and `offsets` were taken. Raises WireError when a held-out record cannot be read."""
        self.start_at(offsets)
        self._seen = dict.fromkeys(tensors[_SEEN].tolist())
        self._turn = int(tensors[_TURN])
        if _ORDER in tensors:  # snapshots of earlier versions lack it
            self._order = tuple(tensors[_ORDER].tolist())
        self.held_out.clear()
        self.held_out.extend(of_tensors(_HELD_OUT, tensors))

    def start_at(self, offsets: Offsets) -> None:
        """Forget what is buffered; the log is read on from here."""
        self._buffers.clear()
        self._skipped.clear()
        self._next_offsets = dict(offsets)

    def begin_anew_at(self, offsets: Offsets) -> None:
        """The same in a log of which nothing was learned: what went through before is no duplicate of what comes."""
        self.start_at(offsets)
        self._seen.clear()

    def _whose_turn(self, draft: _Draft, may_pass_over: bool) -> int | None:
        for ahead in range(len(self._order)):
            place = (draft.turn + ahead) % len(self._order)
            partition = self._order[place]
            if draft.taken.get(partition, 0) < len(self._buffers[partition]):
                draft.turn = (place + 1) % len(self._order)
                return partition
            if not may_pass_over:
                return None
        return None

    def _consider(self, draft: _Draft, partition: int) -> None:
        """The partition's next record is learned, held out, a duplicate or poison."""
        index = draft.taken.get(partition, 0)
        draft.taken[partition] = index + 1
        offset, record = self._buffers[partition][index]
        if (partition, offset) in self._poison:
            draft.poison.append((partition, offset, record))
            return
        name = record_key(record)
        match disposition(name, is_held_out(record, self._held_out_every), self._seen, draft.seen):
            case Disposition.DUPLICATE:
                draft.num_duplicates += 1
                return
            case Disposition.HELD_OUT:
                draft.held_out.append((partition, offset, record))
            case Disposition.LEARNED:
                draft.records.append(record)
                draft.places.append((partition, offset))
        draft.seen[name] = None

    def _commit(self, draft: _Draft) -> Batch:
        for partition, number in draft.taken.items():
            for _ in range(number):
                self._buffers[partition].popleft()
        self._turn = draft.turn
        self._seen |= draft.seen
        forget_oldest(self._seen)
        self.held_out.extend(record for _, _, record in draft.held_out)
        return Batch(
            tuple(draft.records),
            tuple(draft.places),
            tuple(draft.poison),
            tuple(draft.held_out),
            draft.num_duplicates,
        )


def seen_names(tensors: Mapping[str, Tensor]) -> frozenset[int]:
    """Names of the last SEEN_RECORDS records that were learned or held out, of what `state` gave."""
    return frozenset(tensors[_SEEN].tolist())
