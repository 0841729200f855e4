"""The recorded answers by what they are for: to judge snapshots, or to learn from."""

from omnidraft.demo.recorded import HELD_OUT_EVERY, RECORDED
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.errors import RequestError
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord


def recorded(num_learned: int) -> tuple[list[TraceRecord], list[TraceRecord]]:
    """Return the recorded answers that are held out, and at most so many that are learned."""
    records = list(archive.read(RECORDED))
    held_out = [record for record in records if is_held_out(record, HELD_OUT_EVERY)]
    return held_out, [record for record in records if not is_held_out(record, HELD_OUT_EVERY)][:num_learned]


def steps_per_snapshot(num_learned: int, num_snapshots: int, records_per_step: int) -> int:
    """Return the number of steps with which at most so many recorded answers make so many snapshots.

    Live answers do not count: their ids, which nobody chooses, say which of them are learned.

    Raises:
        RequestError: the recorded answers are too few for one step each.
    """
    _, learned = recorded(num_learned)
    steps = len(learned) // records_per_step // num_snapshots
    if steps == 0:
        raise RequestError(
            f"{num_snapshots} snapshots are learned from {num_snapshots * records_per_step} recorded answers or more, "
            f"and these are {len(learned)}: choose fewer --num-snapshots or more --num-recorded"
        )
    return steps
