"""Through the log once more: what should have become of every offset before the newest snapshot's.

Records take turns over the partitions as in the intake, so that what is a duplicate is decided as it was then, except
where a partition was idle and a record came again almost SEEN_RECORDS later.
"""

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from omnidraft.audit.dedup_window import DedupWindow, Place
from omnidraft.audit.findings import UNDECIDED, Fault, FaultKind
from omnidraft.audit.snapshot_deltas import SnapshotDelta
from omnidraft.distill.ingest.record_disposition import (
    Disposition,
    disposition,
    forget_oldest,
    is_held_out,
    is_sampled_out,
    record_key,
)
from omnidraft.distill.ingest.trace_consumer import OTHER_PAIR, PolledRecords
from omnidraft.ports import Offsets
from omnidraft.traces.record import TraceRecord

Letters = Mapping[Place, str]
"""Every offset that a dead letter stands for -> its reason."""


class LogReplay:
    """Told every poll of a source, in order. What it keeps of a record is its name and place."""

    def __init__(
        self,
        stages: Sequence[SnapshotDelta],
        letters: Letters,
        remembered: DedupWindow | None,
        *,
        held_out_every: int,
    ) -> None:
        self.start: Offsets = stages[0].start if stages else {}
        """Partition -> where the walk begins; what lies before it is no concern of these stages."""
        self.end: Offsets = _ends_of_newest(stages)
        """Partition -> where the walk ends."""
        self.faults: list[Fault] = []
        self.found: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
        """(stage, partition) -> fate -> offsets."""
        self.num_known_lost: Counter[int] = Counter()
        """Stage -> records that it passed over, each told by a fault of its own."""
        self.num_gone: Counter[int] = Counter()
        """Stage -> offsets that the log lacks, or whose fate depends on such."""
        self.first: dict[int, int] = {}
        self._stages, self._letters, self._remembered = stages, letters, remembered
        self._ends = {partition: _running_ends(stages, partition) for partition in self.end}
        self._held_out_every = held_out_every
        self._next: dict[int, int] = {}
        self._waiting: dict[int, deque[tuple[int, int, bool]]] = {partition: deque() for partition in sorted(self.end)}
        self._seen: dict[int, None] = {}
        self._learned_at: dict[int, Place] = {}

    def update(self, polled: PolledRecords) -> None:
        """What a poll gave."""
        records = {(partition, offset): record for partition, offset, record in polled.records}
        reasons = {
            (partition, offset): reason
            for partition, last, reason, number in polled.skipped
            for offset in range(last - number + 1, last + 1)
        }
        for place in sorted({**records, **reasons}):
            if not self._arrives(place):
                continue
            fate_in_sample = self._disposition_in_range(place, records[place]) if place in records else None
            if fate_in_sample:
                self._count(place, fate_in_sample)
            elif place in self._letters:
                self._count(place, self._letters[place])
            elif place in records:
                record = records[place]
                self._waiting[place[0]].append(
                    (place[1], record_key(record), is_held_out(record, self._held_out_every))
                )
            else:
                self._skipped(place, reasons[place])
        self._take_turns(is_drained=False)

    def finish(self, log_ends: Offsets) -> None:
        """The log holds nothing more."""
        self._take_turns(is_drained=True)
        for partition, end in self.end.items():
            log_end, is_empty = log_ends.get(partition, 0), partition not in self._next
            start = self.start.get(partition, 0)
            self._miss(partition, self._next.get(partition, start), min(end, log_end), is_retention=is_empty)
            self._miss(partition, max(start, log_end), end, is_retention=False)
            if is_empty and end:
                self._unlearned_expired(partition, end, log_end)
            self.first.setdefault(partition, min(end, log_end) if is_empty else start)
        self._judge_memory()

    def _disposition_in_range(self, place: Place, record: TraceRecord) -> str | None:
        """Return the disposition of a record that a lagging learner left out; None when it was treated as any other."""
        stage = self._stage(*place)
        for sampled in self._stages[stage].lag_samples:
            if not sampled.holds(*place):
                continue
            if sampled.share is None:
                self.num_gone[stage] += 1
                return UNDECIDED
            if is_sampled_out(record, sampled.share):
                return Disposition.SAMPLED_OUT.value
        return None

    def _arrives(self, place: Place) -> bool:
        """Whether it lies before the end; what is missing before it is noted."""
        partition, offset = place
        start, end = self.start.get(partition, 0), self.end.get(partition, 0)
        if offset < start:
            return False
        is_first = partition not in self._next
        if is_first:
            self.first[partition] = offset
            self._unlearned_expired(partition, end, offset)
        self._miss(partition, self._next.get(partition, start), min(offset, end), is_retention=is_first)
        self._next[partition] = max(offset + 1, self._next.get(partition, 0))
        return offset < end

    def _unlearned_expired(self, partition: int, end: int, first: int) -> None:
        if first > end:
            what = "deleted from the log before they were learned; the learner counts them as expired when it goes on"
            self.faults.append(Fault(FaultKind.LOST, first - end, what, None, partition, end))

    def _miss(self, partition: int, start: int, stop: int, *, is_retention: bool) -> None:
        """Offsets that the log lacks: at its beginning that is retention, anywhere else a loss."""
        for stage, number in self._by_stage(partition, start, stop):
            self.num_gone[stage] += number
            self.num_known_lost[stage] += 0 if is_retention else number
        if start < stop and not is_retention:
            what = f"the log lacks offsets {start} to {stop - 1}"
            self.faults.append(Fault(FaultKind.LOST, stop - start, what, None, partition, start))

    def _by_stage(self, partition: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Index of a stage, and how many of these offsets are its own."""
        while start < stop:
            stage = self._stage(partition, start)
            until = min(stop, self._ends[partition][stage])
            yield stage, until - start
            start = until

    def _skipped(self, place: Place, reason: str) -> None:
        self._count(place, reason)
        if reason != OTHER_PAIR:
            what = f"{reason}, and there is no dead letter of it"
            self.faults.append(Fault(FaultKind.LOST, 1, what, None, *place))

    def _take_turns(self, *, is_drained: bool) -> None:
        """A record of each partition, as long as none has to be waited for."""
        while any(self._waiting.values()):
            if not is_drained and any(self._is_late(partition) for partition in self._waiting):
                return
            for partition, queue in self._waiting.items():
                if queue:
                    self._decide(partition, *queue.popleft())

    def _is_late(self, partition: int) -> bool:
        """Whether its next record is still to be read."""
        start = self.start.get(partition, 0)
        return not self._waiting[partition] and self._next.get(partition, start) < self.end[partition]

    def _decide(self, partition: int, offset: int, name: int, held_out: bool) -> None:
        place = (partition, offset)
        decided = disposition(name, held_out, self._seen)
        self._count(place, decided)
        if decided is Disposition.DUPLICATE:
            return
        self._seen[name] = None
        forget_oldest(self._seen)
        if self._remembered is not None:
            self._remembered.update(place, name)
        if decided is Disposition.LEARNED:
            earlier = self._learned_at.setdefault(name, place)
            if earlier != place:
                what = f"the same record as at {earlier[0]}:{earlier[1]}, too far back to be known as a duplicate"
                self.faults.append(Fault(FaultKind.LEARNED_TWICE, 1, what, None, *place))

    def _judge_memory(self) -> None:
        if self._remembered is None:
            return
        for place in self._remembered.forgotten():
            self.num_known_lost[self._stage(*place)] += 1
            what = "the newest snapshot does not remember it"
            self.faults.append(Fault(FaultKind.LOST, 1, what, self._stages[-1].version, *place))
        unknown = self._remembered.num_unknown()
        is_whole = all(first <= self.start.get(partition, 0) for partition, first in self.first.items())
        if unknown and is_whole and not any(counts[UNDECIDED] for counts in self.found.values()):
            what = "the newest snapshot remembers records that lie at no offset before its own"
            self.faults.append(Fault(FaultKind.MISCOUNTED, unknown, what, self._stages[-1].version))

    def _count(self, place: Place, decided: str) -> None:
        self.found[self._stage(*place), place[0]][str(decided)] += 1

    def _stage(self, partition: int, offset: int) -> int:
        """Index of the first stage that ends behind this offset."""
        return bisect_right(self._ends[partition], offset)


def _ends_of_newest(stages: Sequence[SnapshotDelta]) -> dict[int, int]:
    partitions = {partition for stage in stages for partition in stage.end}
    return {partition: stages[-1].end.get(partition, 0) for partition in sorted(partitions)}


def _running_ends(stages: Sequence[SnapshotDelta], partition: int) -> list[int]:
    """Never falling, so that every offset has its stage even where a snapshot went back."""
    ends: list[int] = []
    for stage in stages:
        ends.append(max(stage.end.get(partition, 0), ends[-1] if ends else 0))
    return ends
