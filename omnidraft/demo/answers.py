"""The recorded answers by what they are for: to judge snapshots, or to learn from."""

from omnidraft.demo.recorded import HELD_OUT_EVERY, RECORDED
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord


def recorded(num_learned: int) -> tuple[list[TraceRecord], list[TraceRecord]]:
    """Return the recorded answers that are held out, and at most so many that are learned."""
    records = list(archive.read(RECORDED))
    held_out = [record for record in records if is_held_out(record, HELD_OUT_EVERY)]
    return held_out, [record for record in records if not is_held_out(record, HELD_OUT_EVERY)][:num_learned]
