"""How much of a log's slice a snapshot learned: what it learned flatters it."""

from collections.abc import Sequence

from omnidraft.distill.ingest.record_disposition import is_held_out, record_key
from omnidraft.snapshots.manifest import Manifest
from omnidraft.traces.record import TraceRecord
from omnidraft.whatif.log_slice import Slice


def note(name: str, num_learned: int | None, num_records: int) -> str:
    """Return what to say of the figures of a snapshot that learned what they are of; None: it may have."""
    of = f"of these {num_records} records"
    if num_learned is None:
        return f"{name}: cannot tell what it learned {of}"
    return f"{name} has learned up to {num_learned} {of}, which flatters it; --held-out takes none"


def count(manifest: Manifest | None, found: Slice, scored: Sequence[TraceRecord], held_out_every: int) -> int | None:
    """Return how many of the scored records lie before the snapshot's offsets and were not held out from it. Those that
    its learner skipped are among them. None: that cannot be told.

    Args:
        manifest: None for the base drafter.
        scored: some of the found records.
        held_out_every: that of snapshots which do not tell theirs.
    """
    if manifest is None or not manifest.num_records:
        return 0
    every = int(manifest.settings.get("held_out_every", held_out_every))
    learnable = [record_key(each) for each in scored if not is_held_out(each, every)]
    if not manifest.offsets:
        return None
    if not learnable:
        return 0
    if found.log_id is None or manifest.log_id not in (None, found.log_id):
        return None
    copies = zip(map(record_key, found.records), found.positions, strict=True)
    first_copies = dict(reversed(list(copies)))
    positions = (first_copies[key] for key in learnable)
    return sum(offset < manifest.offsets.get(partition, 0) for partition, offset in positions)
