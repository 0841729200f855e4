"""The batch: what one step learns, and what it leaves out."""

from dataclasses import dataclass

from omnidraft.distill.ingest.record_disposition import Disposition
from omnidraft.distill.ingest.trace_consumer import RecordAt
from omnidraft.ports import OVER_SHARE, POISON
from omnidraft.traces.record import TraceRecord


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of one step, which has fewer of them, or none, where a full buffer had no more."""

    records: tuple[TraceRecord, ...]
    positions: tuple[tuple[int, int], ...]
    """(partition, offset) of each record."""
    poison: tuple[RecordAt, ...]
    """Records to be dead-lettered instead."""
    held_out: tuple[RecordAt, ...]
    num_duplicates: int
    num_over_share: int = 0
    """Records that were left out because their tenants had their share of the step."""

    def skipped(self) -> dict[str, int]:
        """Return the number of records of the batch that are not learned, by reason."""
        return {
            Disposition.DUPLICATE.value: self.num_duplicates,
            Disposition.HELD_OUT.value: len(self.held_out),
            POISON: len(self.poison),
            OVER_SHARE: self.num_over_share,
        }
