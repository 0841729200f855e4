"""The replay of the log: which disposition every offset before the newest snapshot's should have had.

Records take turns over the partitions as in the batcher, so duplicates are decided as they were then, except where a
partition was idle and a record came again almost SEEN_RECORDS later.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import zip_longest

from omnidraft.audit.findings import Fault, FaultKind
from omnidraft.audit.snapshot_deltas import SnapshotDelta
from omnidraft.distill.ingest.record_disposition import (
    SEEN_RECORDS,
    Disposition,
    disposition,
    forget_oldest,
    is_held_out,
    record_key,
)
from omnidraft.distill.ingest.trace_consumer import PartitionOffset, PolledRecords
from omnidraft.ports import FORGOTTEN, OTHER_PAIR, PASSED_OVER, Offsets

DeadLetterReasons = Mapping[PartitionOffset, str]
"""Position of every message that a dead letter stands for -> its reason."""
Readable = tuple[int, bool]
"""The key of a record of the pair, and whether it is held out."""


class LogReplay:
    """Gets every poll of a consumer; keeps the key, the disposition and the position of each record."""

    def __init__(
        self,
        deltas: Sequence[SnapshotDelta],
        dead_letters: DeadLetterReasons,
        *,
        seen_keys: Set[int] | None,
        held_out_every: int,
        seen_records: int = SEEN_RECORDS,
    ) -> None:
        """
        Args:
            seen_keys: the keys that the newest snapshot holds for deduplication, those of the last `seen_records`
                records that were learned or held out; None when they are not known.
        """
        self.end: Offsets = _ends_of_newest(deltas)
        """Partition -> one past the last offset of the replay."""
        self.faults: list[Fault] = []
        self.dispositions: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
        """(index of the delta, partition) -> disposition -> offsets."""
        self.num_known_lost: Counter[int] = Counter()
        """Index of the delta -> records that it lost, each reported by a fault of its own."""
        self.num_gone: Counter[int] = Counter()
        """Index of the delta -> offsets whose disposition is unknown: the log lacks them, or their content."""
        self.first: dict[int, int] = {}
        """Partition -> the oldest offset that the log still holds, from the first that concerns these snapshots on."""
        self._start: Offsets = deltas[0].start if deltas else {}
        self._deltas, self._dead_letters, self._seen_keys = deltas, dead_letters, seen_keys
        self._ends = {partition: _running_ends(deltas, partition) for partition in self.end}
        self._held_out_every, self._seen_records = held_out_every, seen_records
        self._read: defaultdict[int, dict[int, Readable | str]] = defaultdict(dict)
        self._seen = OrderedDict[int, None]()
        self._through: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """Partition -> offset and key of each record that was learned or held out."""
        self._learned_at: dict[int, PartitionOffset] = {}

    def update(self, polled: PolledRecords) -> None:
        """Take in a poll."""
        for partition, last, reason, number in polled.skipped:
            self._read[partition] |= dict.fromkeys(range(last - number + 1, last + 1), reason)
        for partition, offset, record in polled.records:
            self._read[partition][offset] = record_key(record), is_held_out(record, self._held_out_every)

    def finish(self, log_ends: Offsets) -> None:
        """Account for all offsets, as the log holds nothing more."""
        queues = []
        for partition in sorted({*self.end, *self._read}):
            start, read = self._start.get(partition, 0), self._read[partition]
            held = sorted(offset for offset in read if offset >= start)
            self._report_gaps(partition, held, start, log_ends.get(partition, 0))
            before_end = held[: bisect_left(held, self.end.get(partition, 0))]
            queues.append([each for offset in before_end if (each := self._record(partition, offset, read[offset]))])
        for turn in zip_longest(*queues):
            for each in filter(None, turn):
                self._decide(*each)
        if self._seen_keys is not None:
            self._check_seen_keys(self._seen_keys)

    def _report_gaps(self, partition: int, held: Sequence[int], start: int, log_end: int) -> None:
        """Report offsets that the log lacks before, between and behind those that it holds."""
        end, oldest = self.end.get(partition, 0), held[0] if held else log_end
        self.first[partition] = oldest if held else min(end, log_end)
        if oldest > end and (held or end):
            what = "deleted from the log before they were learned; the learner counts them as expired when it goes on"
            self.faults.append(Fault(FaultKind.LOST, oldest - end, what, None, partition, end))
        self._report_missing(partition, start, min(oldest, end), is_retention=True)
        expected = oldest
        for offset in (*held, log_end):
            self._report_missing(partition, expected, min(offset, end), is_retention=False)
            expected = max(expected, offset + 1)
        self._report_missing(partition, max(start, log_end), end, is_retention=False)

    def _record(self, partition: int, offset: int, read: Readable | str) -> tuple[PartitionOffset, int, bool] | None:
        """Return a record that takes its turn; count any other offset at once."""
        position = partition, offset
        passed_over = self._deltas[self._delta_index(*position)].passed_over.get(partition)
        if passed_over is not None and offset >= passed_over:  # the learner lagged, and went on behind this offset
            self._count(position, PASSED_OVER)
        elif position in self._dead_letters:
            self._count(position, self._dead_letters[position])
        elif isinstance(read, str):
            self._count_skipped(position, read)
        else:
            return position, *read
        return None

    def _report_missing(self, partition: int, start: int, stop: int, *, is_retention: bool) -> None:
        """Report offsets that the log lacks: at its beginning that is retention, anywhere else a loss."""
        for delta, number in self._by_delta(partition, start, stop):
            self.num_gone[delta] += number
            self.num_known_lost[delta] += 0 if is_retention else number
        if start < stop and not is_retention:
            what = f"the log lacks offsets {start} to {stop - 1}"
            self.faults.append(Fault(FaultKind.LOST, stop - start, what, None, partition, start))

    def _by_delta(self, partition: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the index of each delta with some of these offsets, and their number."""
        while start < stop:
            delta = self._delta_index(partition, start)
            until = min(stop, self._ends[partition][delta])
            yield delta, until - start
            start = until

    def _count_skipped(self, position: PartitionOffset, reason: str) -> None:
        if reason == FORGOTTEN:  # what became of it before that is not known any more
            self.num_gone[self._delta_index(*position)] += 1
        self._count(position, reason)
        if reason not in (OTHER_PAIR, FORGOTTEN):
            what = f"{reason}, and there is no dead letter of it"
            self.faults.append(Fault(FaultKind.LOST, 1, what, None, *position))

    def _decide(self, position: PartitionOffset, key: int, held_out: bool) -> None:
        decided = disposition(key, held_out, self._seen)
        self._count(position, decided)
        if decided is Disposition.DUPLICATE:
            return
        self._seen[key] = None
        forget_oldest(self._seen, self._seen_records)
        self._through[position[0]].append((position[1], key))
        if decided is Disposition.LEARNED:
            earlier = self._learned_at.setdefault(key, position)
            if earlier != position:
                what = f"the same record as at {earlier[0]}:{earlier[1]}, too far back to be known as a duplicate"
                self.faults.append(Fault(FaultKind.LEARNED_TWICE, 1, what, None, *position))

    def _check_seen_keys(self, keys: Set[int]) -> None:
        """Compare the log with the keys that the newest snapshot holds. Within a partition records go through in order,
        so behind the oldest one whose key is held, every key is, however the partitions took turns."""
        version = self._deltas[-1].version if self._deltas else None
        for partition, through in self._through.items():
            newest = through[-self._seen_records :]
            last = {key: offset for offset, key in newest}  # the later one of a record learned twice
            first_held = min((offset for key, offset in last.items() if key in keys), default=None)
            for offset, key in newest:
                if first_held is not None and offset > first_held and last[key] == offset and key not in keys:
                    self.num_known_lost[self._delta_index(partition, offset)] += 1
                    what = "the newest snapshot does not remember it"
                    self.faults.append(Fault(FaultKind.LOST, 1, what, version, partition, offset))
        unknown = len(keys - {key for through in self._through.values() for _, key in through})
        is_whole = all(first <= self._start.get(partition, 0) for partition, first in self.first.items())
        is_open = any(counts[FORGOTTEN] for counts in self.dispositions.values())
        if unknown and is_whole and not is_open:
            what = "the newest snapshot remembers records that lie at no offset before its own"
            self.faults.append(Fault(FaultKind.MISCOUNTED, unknown, what, version))

    def _count(self, position: PartitionOffset, decided: str) -> None:
        self.dispositions[self._delta_index(*position), position[0]][str(decided)] += 1

    def _delta_index(self, partition: int, offset: int) -> int:
        """Return the index of the first delta that ends behind this offset."""
        return bisect_right(self._ends[partition], offset)


def _ends_of_newest(deltas: Sequence[SnapshotDelta]) -> dict[int, int]:
    partitions = {partition for delta in deltas for partition in delta.end}
    return {partition: deltas[-1].end.get(partition, 0) for partition in sorted(partitions)}


def _running_ends(deltas: Sequence[SnapshotDelta], partition: int) -> list[int]:
    """Return the ends of all deltas, made non-decreasing: every offset has a delta even where a snapshot went back."""
    ends: list[int] = []
    for delta in deltas:
        ends.append(max(delta.end.get(partition, 0), ends[-1] if ends else 0))
    return ends
