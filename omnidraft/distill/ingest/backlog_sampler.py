"""Reading past records, keeping a sample of them: what of it is learned, and what was skipped between.

Memory is bounded by the sample, however many records are passed: what was skipped is counted between neighbours of the
sample, and a record that gives way joins the counts on both its sides.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from omnidraft.distill.ingest.record_disposition import Disposition
from omnidraft.distill.ingest.stratified_recent_sample import StratifiedRecentSample
from omnidraft.distill.ingest.trace_consumer import PolledRecords, RecordAt, Skipped
from omnidraft.ports import Offsets
from omnidraft.snapshots.manifest import LagSample


class BacklogSampler:
    """One reading to the end of the log. Told every poll, in order."""

    def __init__(self, start: Offsets, until: Offsets, *, num_kept: int) -> None:
        """`until` has to be reached; the range ends where the poll that reaches it ends."""
        self._start, self._until, self._num_kept = dict(start), until, num_kept
        self._sample: StratifiedRecentSample[RecordAt] = StratifiedRecentSample(num_kept)
        self._skips: defaultdict[int, _Skips] = defaultdict(_Skips)
        self._read_to = dict(start)
        self.num_passed = 0
        """Sound records."""

    def update(self, polled: PolledRecords) -> None:
        """What a poll gave."""
        reasons = {each[:2]: each[2:] for each in polled.skipped}
        records = {(partition, offset): record for partition, offset, record in polled.records}
        for partition, offset in sorted({**reasons, **records}):
            if (partition, offset) in reasons:
                reason, number = reasons[partition, offset]
                self._start.setdefault(partition, offset - number + 1)
                self._skips[partition].skip(reason, number)
            else:
                self._start.setdefault(partition, offset)
                self._pass((partition, offset, records[partition, offset]))
        self._read_to |= polled.next_offsets

    def has_reached_the_end(self) -> bool:
        return all(self._read_to.get(partition, 0) >= end for partition, end in self._until.items())

    @property
    def num_kept(self) -> int:
        return len(self._sample)

    @property
    def num_tenants(self) -> int:
        return self._sample.num_tenants

    def kept(self) -> list[RecordAt]:
        """The sample, in offset order within each partition."""
        return sorted(self._sample, key=lambda each: each[:2])

    def skipped(self) -> Iterator[Skipped]:
        """All else, the records that gave way as `sampled_out`."""
        for partition, skips in self._skips.items():
            for before, reason, number in skips.runs():
                end = self._read_to[partition] if before is None else before
                yield partition, end - 1, reason, number

    def range(self) -> LagSample:
        """For the manifest."""
        return LagSample(start=self._start, end=self._read_to, num_kept=self._num_kept)

    def _pass(self, kept: RecordAt) -> None:
        partition, offset, record = kept
        self.num_passed += 1
        self._skips[partition].keep(offset)
        gave_way = self._sample.add(record.tenant, (record.time_ms, partition, offset), kept)
        if gave_way is not None:
            self._skips[gave_way[0]].drop(gave_way[1])


class _Skips:
    """Of one partition: how many messages were skipped before each kept one, and behind the last.

    A ring of kept offsets in their order, closed by None, which stands for the end.
    """

    def __init__(self) -> None:
        self._next: dict[int | None, int | None] = {None: None}
        self._previous: dict[int | None, int | None] = {None: None}
        self._before: dict[int | None, Counter[str]] = {None: Counter()}

    def keep(self, offset: int) -> None:
        """The next one, behind all others."""
        last = self._previous[None]
        self._next[last] = self._previous[None] = offset
        self._previous[offset], self._next[offset] = last, None
        self._before[offset], self._before[None] = self._before[None], Counter()

    def skip(self, reason: str, number: int) -> None:
        """The next ones."""
        self._before[None][reason] += number

    def drop(self, offset: int) -> None:
        """One that was kept is not any more."""
        previous, following = self._previous.pop(offset), self._next.pop(offset)
        self._next[previous], self._previous[following] = following, previous
        self._before[following] += self._before.pop(offset)
        self._before[following][Disposition.SAMPLED_OUT.value] += 1

    def runs(self) -> Iterator[tuple[int | None, str, int]]:
        """(the kept offset behind them or None, reason, number)."""
        for offset, counts in self._before.items():
            for reason, number in counts.items():
                yield offset, reason, number
