"""How much of a log's slice a snapshot learned: what it learned flatters it."""

from collections.abc import Sequence

from omnidraft.distill.ingest.record_disposition import is_held_out, record_key
from omnidraft.snapshots.manifest import Manifest
from omnidraft.traces.record import TraceRecord
from omnidraft.whatif.log_slice import Slice


class LearnedRecords:
    """Counts those of the scored records that a snapshot learned."""

    def __init__(self, log_records: Slice, scored: Sequence[TraceRecord], held_out_every: int) -> None:
        """
        Args:
            scored: some of the log's records.
            held_out_every: that of snapshots which do not tell theirs.
        """
        self._log_id, self._scored, self._held_out_every = log_records.log_id, scored, held_out_every
        copies = zip(map(record_key, log_records.records), log_records.positions, strict=True)
        self._positions = dict(reversed(list(copies)))
        """That of each record's first copy, by its key."""

    def note(self, name: str, manifest: Manifest | None) -> str | None:
        """Return what to say of the snapshot's figures where it learned, or may have learned, what they are of."""
        num, of = self.count(manifest), f"of these {len(self._scored)} records"
        if num is None:
            return f"{name}: cannot tell what it learned {of}"
        return f"{name} has learned up to {num} {of}, which flatters it; --held-out takes none of them" if num else None

    def count(self, manifest: Manifest | None) -> int | None:
        """Return how many records lie before the snapshot's offsets and were not held out from it. Those that its
        learner skipped are among them. None: that cannot be told.

        Args:
            manifest: None for the base drafter.
        """
        if manifest is None or not manifest.num_records:
            return 0
        every = int(manifest.settings.get("held_out_every", self._held_out_every))
        learnable = [record_key(each) for each in self._scored if not is_held_out(each, every)]
        if not manifest.offsets:
            return None
        if not learnable:
            return 0
        if self._log_id is None or manifest.log_id not in (None, self._log_id):
            return None
        positions = (self._positions[key] for key in learnable)
        return sum(offset < manifest.offsets.get(partition, 0) for partition, offset in positions)
