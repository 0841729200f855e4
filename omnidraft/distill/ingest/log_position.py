"""Where in the log the learner goes on, when the log is not what it was.

Messages expired before they were read: go on at the oldest, and count the others as `expired`; they are as many as
there are offsets between. The log ends before what was learned, or is another one under the same name: nobody but an
operator knows which of its messages were learned, so say so, and wait for the order to restart somewhere.
A log that was restored from a backup and has grown past these offsets since looks like itself; `traces verify` shows
it.
"""

import logging
from collections.abc import Mapping
from typing import Any

from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.trace_consumer import SKIPPED, PolledRecords, TraceConsumer
from omnidraft.errors import LogReplaced
from omnidraft.ports import Announcement, Metrics, Offsets
from omnidraft.snapshots.manifest import Manifest

EXPIRED = "expired"
"""Reason of messages that the log had deleted before the learner came to them."""
ADVICE = (
    "name the log that it learned from (log.url), restore that one whole, or say where to go on in this one: "
    "`omnidraft learning restart --from earliest` learns all that it holds, `--from latest` what comes from now on, "
    '`--from "0:120 1:96"` from these offsets'
)

logger = logging.getLogger(__name__)


class LogPosition:
    """Between a source and its intake, as catch_up.py is."""

    def __init__(self, source: TraceConsumer, intake: Batcher, metrics: Metrics) -> None:
        self._source, self._intake, self._metrics = source, intake, metrics
        self._log_id: str | None = None
        self._restarts: tuple[str, ...] = ()

    def resume(self, manifest: Manifest) -> None:
        """This snapshot says what was done before."""
        self._log_id, self._restarts = manifest.log_id, manifest.restarts

    def facts(self) -> Mapping[str, Any]:
        """For the next manifest."""
        return {"log_id": self._log_id, "restarts": self._restarts}

    def find(self) -> None:
        """Place the source where the intake goes on.

        Raises:
            LogReplaced: this is not the log of the intake's offsets, as far as can be told.
            BusError: the log cannot be read.
        """
        log_id, firsts, ends = self._source.identity(), self._source.first_offsets(), self._source.end_offsets()
        read_to = {partition: offset for partition, offset in self._intake.read_to.items() if offset}
        require_same_log(self._log_id, log_id, read_to, ends)
        missed = {partition: first for partition, first in firsts.items() if first > read_to.get(partition, 0)}
        self._source.seek(read_to | missed)
        self._pass_over(missed, read_to)
        self._log_id = log_id

    def is_new(self, order: Announcement) -> bool:
        """Whether this restart was neither carried out nor set aside."""
        return order.restart_id not in self._restarts

    def set_aside(self, order: Announcement | None) -> None:
        """Do nothing about it, now or later."""
        if order is not None and order.restart_id is not None:
            self._restarts = (*self._restarts, order.restart_id)

    def restart(self, order: Announcement) -> bool:
        """Whether the source and the intake stand where this order says; else the log has no such place, and the order
        is set aside. Raises BusError."""
        log_id, firsts, ends = self._source.identity(), self._source.first_offsets(), self._source.end_offsets()
        offsets = _ordered(order.start or "", firsts, ends)
        held = " ".join(f"{partition}:{first}-{ends[partition]}" for partition, first in sorted(firsts.items()))
        if not all(firsts.get(each, 1) <= offset <= ends.get(each, 0) for each, offset in offsets.items()):
            logger.error("learning is not restarted at %s: the log holds %s; order another place", order.start, held)
            self.set_aside(order)
            return False
        self._source.seek(offsets)
        before = self._intake.offsets()
        self._intake.begin_anew_at(offsets)
        self.set_aside(order)
        self._log_id = log_id
        logger.warning("learning restarts at %s instead of %s, as ordered; the log holds %s", offsets, before, held)
        return True

    def _pass_over(self, missed: Offsets, read_to: Offsets) -> None:
        numbers = {partition: first - read_to.get(partition, 0) for partition, first in missed.items()}
        skipped = [(partition, missed[partition] - 1, EXPIRED, number) for partition, number in numbers.items()]
        self._intake.add(PolledRecords((), missed, tuple(skipped)))
        for partition, number in numbers.items():
            self._metrics.add(SKIPPED, number, reason=EXPIRED)
            logger.warning(
                "%d messages of partition %d expired before they were learned (offsets %d to %d); learning goes on at "
                "the oldest that is left. Keep messages for longer than a learner is away: log.retention_hours",
                number,
                partition,
                missed[partition] - number,
                missed[partition] - 1,
            )


def require_same_log(known_id: str | None, log_id: str, offsets: Offsets, ends: Offsets) -> None:
    """Raises LogReplaced where these offsets, of the log `known_id` names, are not of the log that `log_id` names.

    Args:
        known_id: None: whatever log it was.
    """
    if not any(offsets.values()):
        return
    if known_id not in (None, log_id):
        what = f"the log is another than the one that was learned from: its identity is {log_id}, that one's {known_id}"
        raise LogReplaced(f"{what}; {ADVICE}")
    beyond = [
        f"offset {offset} of partition {partition}, which ends at {ends.get(partition, 0)}"
        for partition, offset in sorted(offsets.items())
        if offset > ends.get(partition, 0)
    ]
    if beyond:
        what = "was it restored from an older backup, or created anew?"
        raise LogReplaced(f"the log ends before what was learned from it ({', '.join(beyond)}): {what} {ADVICE}")


def _ordered(start: str, firsts: Offsets, ends: Offsets) -> Offsets:
    """Of every partition; those that the order does not name start at their first message."""
    if start == "latest":
        return dict(ends)
    if start == "earliest":
        return dict(firsts)
    named = (each.split(":") for each in start.split())
    return {**firsts, **{int(partition): int(offset) for partition, offset in named}}
