"""The batcher: in which order records are learned, which are held out, and which are duplicates.

Partitions take turns in the order of their numbers, one record each. A partition without a record at its turn is waited
for; it is passed over when it is read to its end and the others either have none too or are LOOKAHEAD ahead. So batches
of records that are in the log already are a function of the log alone, whatever each poll returned, and of what the
consumer leaves out nothing is known here. Where records come while this runs and a partition is idle, the interleaving
of partitions depends on time; that each record is learned once does not. Each tenant has its share of a batch
(tenant_shares.py). A partition that is added to the topic while this runs is buffered from its first message on, and
takes its turns from the next snapshot on (`admit_partitions`). A run that resumes from the snapshot before does the
same, so both make the same batches. It does not wait for a snapshot where the others are idle or a buffer is full. A
batch is taken whole or not at all, so the records not learned yet are exactly those in the buffers. It ends at the
latest after LOOKAHEAD records, which a buffer holds: where the log repeats itself, it has few records to learn or none.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.ingest.batch import Batch
from omnidraft.distill.ingest.record_disposition import (
    ANYBODY,
    SEEN_RECORDS,
    Disposition,
    disposition,
    forget_oldest,
    hash_63,
    is_held_out,
    record_key,
)
from omnidraft.distill.ingest.tenant_shares import StepShare, StepShares, TenantGroups, keep_newest_of_each
from omnidraft.distill.ingest.trace_consumer import PolledRecords, RecordAt, Skipped
from omnidraft.distill.resume_tensors import records_from_tensors, records_to_tensors
from omnidraft.ports import PASSED_OVER, Offsets
from omnidraft.traces.record import TraceRecord

LOOKAHEAD = 1024
"""Records buffered of a partition, about 25 kB each, before idle ones are passed over, and the most that a batch goes
through."""
MOST_AHEAD = 4
"""Times LOOKAHEAD that a partition may be ahead of one that has messages left, which may all be for others: 100 MB."""
HELD_OUT_RECORDS = 24
"""As many are measured in the time of a few steps."""
_SEEN, _TURN, _ORDER, _RECENT, _HELD_OUT = "seen", "turn", "partitions", "recent_tenants", "held_out."
_NEWEST, TENANTS = "newest_ms", "tenants"


@dataclass(slots=True)
class _PartialBatch:
    """A batch that is being filled; it has no effect before it ends."""

    turn: int
    share: StepShare
    records: list[TraceRecord] = field(default_factory=list)
    positions: list[tuple[int, int]] = field(default_factory=list)
    poison: list[RecordAt] = field(default_factory=list)
    held_out: list[RecordAt] = field(default_factory=list)
    seen: dict[int, None] = field(default_factory=dict)
    num_duplicates: int = 0
    newest_ms: int = 0
    taken: dict[int, int] = field(default_factory=dict)


class Batcher:
    """The buffers of all partitions, and the keys of the records that went through."""

    def __init__(
        self,
        partitions: Iterable[int],
        *,
        records_per_step: int,
        held_out_every: int,
        held_out_records: int = HELD_OUT_RECORDS,
        seen_records: int = SEEN_RECORDS,
        poison: Container[tuple[int, int]] = frozenset(),
        tenant_share: float = 1.0,
        groups: TenantGroups | None = None,
    ) -> None:
        """
        Args:
            held_out_every: the answers to one prompt in so many are held out; 0 holds none out.
            held_out_records: maximal number of held-out records, of which the newest of each tenant stay.
            seen_records: see record_disposition.py.
            poison: positions of records that must not be learned from.
            tenant_share: see tenant_shares.py, `groups` too; None makes each tenant one.
        """
        self._order = tuple(sorted(partitions))
        """The partitions that take turns."""
        self._buffers: defaultdict[int, deque[tuple[int, TraceRecord]]] = defaultdict(deque)
        self._next_offsets: dict[int, int] = {}
        self._skipped: list[Skipped] = []
        self._records_per_step, self._held_out_every = records_per_step, held_out_every
        self._poison, self._seen_records = poison, seen_records
        self._turn = 0
        self._seen = OrderedDict[int, None]()
        self._groups, self._held_out_records = groups or TenantGroups(), held_out_records
        self._shares = StepShares(self._groups, share=tenant_share, records_per_step=records_per_step)
        self.held_out: deque[TraceRecord] = deque()
        self.newest_ms = 0
        """The time of the newest record that went through, Unix milliseconds."""
        self._tenants = set[int]()
        """Hashes of the tenants that the learner may have learned from; ANYBODY for more than SEEN_RECORDS."""
        self._fresh = self.state()

    def add(self, polled: PolledRecords) -> None:
        """Buffer the records of a poll, which are in offset order within each partition."""
        for partition, offset, record in polled.records:
            self._buffers[partition].append((offset, record))
        self._skipped += polled.skipped
        self._next_offsets |= polled.next_offsets

    def take(self, *, is_drained: bool, ends: Offsets | None = None) -> Batch | None:
        """Return the next batch, or None until more is polled.

        Args:
            is_drained: everything is read, so no partition is waited for.
            ends: of the partitions, as far as they are known.
        """
        passed_over = self._passed_over(is_drained, ends or {})
        partial = _PartialBatch(turn=self._turn, share=self._shares.begin(), newest_ms=self.newest_ms)
        for _ in range(LOOKAHEAD):
            partition = self._next_partition(partial, passed_over)
            if partition is None:
                return None
            self._consider(partial, partition)
            if len(partial.records) == self._records_per_step:
                break
        return self._commit(partial)

    def admit_partitions(self) -> None:
        """Let partitions that were added take turns from now on."""
        self._order = tuple(sorted({*self._order, *self._buffers}))

    def offsets(self) -> dict[int, int]:
        """Return the next offsets: every record before them is learned, held out, a duplicate or skipped."""
        waiting = {partition: buffer[0][0] for partition, buffer in self._buffers.items() if buffer}
        return self._next_offsets | waiting

    @property
    def read_to(self) -> Offsets:
        """The offsets up to which the log is read."""
        return dict(self._next_offsets)

    def take_skipped(self) -> Counter[str]:
        """Return reason -> number of messages that were skipped and lie before `offsets`, each message once."""
        offsets = self.offsets()
        passed = [each for each in self._skipped if each[1] < offsets[each[0]]]
        self._skipped = [each for each in self._skipped if each[1] >= offsets[each[0]]]
        counts = Counter[str]()
        for _, _, reason, number in passed:
            counts[reason] += number
        return counts

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a snapshot needs beside the offsets."""
        tensors = {
            _SEEN: torch.from_numpy(np.array(list(self._seen), np.int64)),
            _TURN: torch.tensor(self._turn),
            _ORDER: torch.tensor(self._order),
            _RECENT: torch.from_numpy(np.array(self._shares.recent, np.int64)),
            _NEWEST: torch.tensor(self.newest_ms),
            TENANTS: torch.from_numpy(np.array(sorted(self._tenants), np.int64)),
        }
        return tensors | records_to_tensors(_HELD_OUT, self.held_out)

    def load_state(self, tensors: Mapping[str, Tensor], offsets: Offsets) -> None:
        """Go on where `state` and `offsets` were taken. Raises WireError when a held-out record cannot be read."""
        self.start_at(offsets)
        self._seen = OrderedDict.fromkeys(tensors[_SEEN].tolist())
        self._turn = int(tensors[_TURN])
        self._order = tuple(tensors[_ORDER].tolist())
        self._shares.restore(tensors[_RECENT].tolist())
        self.newest_ms = int(tensors[_NEWEST])
        self._tenants = set(tensors[TENANTS].tolist())
        self.held_out.clear()
        self._hold_out(records_from_tensors(_HELD_OUT, tensors))

    def start_afresh(self, offsets: Offsets) -> None:
        """Go on at these offsets as a new batcher of these partitions."""
        self.load_state(self._fresh | {_ORDER: torch.tensor(self._order)}, offsets)

    def add_tenants(self, hashes: Collection[int]) -> None:
        """Note that the learner may have learned from these tenants too."""
        known = self._tenants.union(hashes)
        self._tenants = {ANYBODY} if ANYBODY in known or len(known) > SEEN_RECORDS else known

    def start_at(self, offsets: Offsets) -> None:
        """Drop the buffers; the log is read on from these offsets."""
        self._buffers.clear()
        self._skipped.clear()
        self._next_offsets = dict(offsets)

    def pass_over(self, offsets: Offsets) -> dict[int, int]:
        """Drop the buffers and count what lies before these offsets as passed over; the log is read on from them.

        Args:
            offsets: of all partitions; where one lies behind what is learned, nothing is passed over.

        Returns:
            The first offset that is passed over, of each partition that has some.
        """
        before = self.offsets()
        firsts = {each: before.get(each, 0) for each, offset in offsets.items() if offset > before.get(each, 0)}
        self.start_at(before | {each: offsets[each] for each in firsts})
        self._skipped += [
            (each, offsets[each] - 1, PASSED_OVER, offsets[each] - first) for each, first in firsts.items()
        ]
        return firsts

    def restart_at(self, offsets: Offsets) -> None:
        """Do the same in a log of which nothing was learned: no record of it is a duplicate of those before."""
        self.start_at(offsets)
        self._seen.clear()

    def is_held_out(self, record: TraceRecord) -> bool:
        """Return whether the record measures agreement, and is not learned from."""
        return is_held_out(record, self._held_out_every)

    def drop_held_out(self, is_dropped: Callable[[TraceRecord], bool]) -> int:
        """Drop held-out records, and return their number."""
        kept = [record for record in self.held_out if not is_dropped(record)]
        num_dropped = len(self.held_out) - len(kept)
        self.held_out = deque(kept)
        return num_dropped

    def _passed_over(self, is_drained: bool, ends: Offsets) -> frozenset[int]:
        """Return the partitions that are not waited for."""
        longest = max(map(len, self._buffers.values()), default=0)
        if is_drained or longest >= LOOKAHEAD:
            self.admit_partitions()
        if is_drained or longest >= MOST_AHEAD * LOOKAHEAD:
            return frozenset(self._order)
        if longest < LOOKAHEAD:
            return frozenset()
        return frozenset(each for each in self._order if ends.get(each) == self._next_offsets.get(each, 0))

    def _next_partition(self, partial: _PartialBatch, passed_over: Container[int]) -> int | None:
        for ahead in range(len(self._order)):
            index_in_order = (partial.turn + ahead) % len(self._order)
            partition = self._order[index_in_order]
            if partial.taken.get(partition, 0) < len(self._buffers[partition]):
                partial.turn = (index_in_order + 1) % len(self._order)
                return partition
            if partition not in passed_over:
                return None
        return None

    def _consider(self, partial: _PartialBatch, partition: int) -> None:
        """Learn or hold out the partition's next record, or drop it as a duplicate or poison."""
        index = partial.taken.get(partition, 0)
        partial.taken[partition] = index + 1
        offset, record = self._buffers[partition][index]
        if (partition, offset) in self._poison:
            partial.poison.append((partition, offset, record))
            return
        partial.newest_ms = max(partial.newest_ms, record.time_ms)
        key = record_key(record)
        match disposition(key, is_held_out(record, self._held_out_every), self._seen, partial.seen):
            case Disposition.DUPLICATE:
                partial.num_duplicates += 1
                return
            case Disposition.HELD_OUT:
                partial.held_out.append((partition, offset, record))
            case Disposition.LEARNED if partial.share.admits(record):
                partial.records.append(record)
                partial.positions.append((partition, offset))
            case Disposition.LEARNED:
                pass  # counted as over its share
        partial.seen[key] = None

    def _commit(self, partial: _PartialBatch) -> Batch:
        taken = [self._buffers[each].popleft()[1] for each, number in partial.taken.items() for _ in range(number)]
        self.add_tenants({hash_63(record.tenant) for record in taken})
        self._turn, self.newest_ms = partial.turn, partial.newest_ms
        self._seen |= partial.seen
        forget_oldest(self._seen, self._seen_records)
        self._shares.commit(partial.share)
        self._hold_out(record for _, _, record in partial.held_out)
        return Batch(
            tuple(partial.records),
            tuple(partial.positions),
            tuple(partial.poison),
            tuple(partial.held_out),
            partial.num_duplicates,
            partial.share.num_over,
        )

    def _hold_out(self, records: Iterable[TraceRecord]) -> None:
        by_key = {record_key(record): record for record in records}
        self.drop_held_out(lambda record: record_key(record) in by_key)  # of before a restart
        self.held_out.extend(by_key.values())
        keep_newest_of_each(self.held_out, self._held_out_records, self._groups)


def seen_keys(tensors: Mapping[str, Tensor]) -> frozenset[int]:
    """Return the keys of the last SEEN_RECORDS records learned or held out, from the tensors of `state`."""
    return frozenset(tensors[_SEEN].tolist())
