"""The samples of a learner that lagged, drawn once more from the log: so whoever was passed over is known by place."""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.audit.dedup_window import Place
from omnidraft.distill.ingest.stratified_recent_sample import StratifiedRecentSample
from omnidraft.distill.ingest.trace_consumer import PolledRecords
from omnidraft.snapshots.manifest import LagSample


@dataclass(frozen=True, slots=True)
class ReplayedSample:
    """One sample."""

    range: LagSample
    kept: frozenset[Place] | None
    """Places that were learned from like any other; None when the log lacks a part of the range by now."""


class LagReplay:
    """Told every poll of a source, in order, from the first message to `end`."""

    def __init__(self, samples: Sequence[LagSample]) -> None:
        """A sample that several snapshots tell of counts once."""
        self._drawn: list[tuple[LagSample, StratifiedRecentSample[Place]]] = []
        for sample in samples:
            if all(sample != other for other, _ in self._drawn):
                self._drawn.append((sample, StratifiedRecentSample(sample.num_kept)))
        self._first: dict[int, int] = {}

    @property
    def end(self) -> dict[int, int]:
        """Partition -> where the last sample ends; without samples nothing need be read."""
        ends: dict[int, int] = {}
        for sample, _ in self._drawn:
            for partition, end in sample.end.items():
                ends[partition] = max(end, ends.get(partition, 0))
        return ends

    def update(self, polled: PolledRecords) -> None:
        """What a poll gave."""
        firsts = [(partition, last - number + 1) for partition, last, _, number in polled.skipped]
        for partition, offset in sorted([*firsts, *(each[:2] for each in polled.records)]):
            self._first.setdefault(partition, offset)
        for partition, offset, record in polled.records:
            for sample, drawn in self._drawn:
                if sample.holds(partition, offset):
                    drawn.add(record.tenant, (record.time_ms, partition, offset), (partition, offset))

    def redrawn(self, samples: Sequence[LagSample]) -> tuple[ReplayedSample, ...]:
        """These of all, once everything is read."""
        return tuple(
            ReplayedSample(sample, frozenset(drawn) if self._is_whole(sample) else None)
            for sample, drawn in self._drawn
            if sample in samples
        )

    def _is_whole(self, sample: LagSample) -> bool:
        """Whether the log still begins before it."""
        return all(
            self._first.get(partition, end) <= sample.start.get(partition, 0)
            for partition, end in sample.end.items()
            if end > sample.start.get(partition, 0)
        )
