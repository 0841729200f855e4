"""From the log to batches: polls into the intake, past what a lagging learner leaves out, over what expired."""

import logging
from collections.abc import Callable

from omnidraft.distill.ingest.batcher import Batch, Batcher
from omnidraft.distill.ingest.catch_up import CatchUp
from omnidraft.distill.ingest.log_position import LogPosition
from omnidraft.distill.ingest.trace_consumer import PolledRecords, TraceConsumer
from omnidraft.errors import OffsetOutOfRange
from omnidraft.ports import Announcement

POLL_RECORDS = 64
POLL_TIMEOUT_S = 0.5

logger = logging.getLogger(__name__)

Polling = Callable[[Callable[[], PolledRecords]], PolledRecords]
"""Polls until the log answers."""


class BatchReader:
    """One learner's. One thread."""

    def __init__(self, source: TraceConsumer, intake: Batcher, catch_up: CatchUp, position: LogPosition) -> None:
        self._source, self._intake, self._catch_up, self._position = source, intake, catch_up, position
        self._is_drained = False

    def next_batch(self, patiently: Polling) -> Batch | None:
        """A full batch; None after a poll that did not complete one.

        Raises:
            LogReplaced: nobody but an operator knows where to go on; and whatever `patiently` raises.
        """
        self._catch_up.look()
        batch = self._intake.take(is_drained=self._is_drained)
        if batch is not None or not self._intake.has_room:
            return batch
        polled = patiently(self._poll)
        self._intake.add(self._catch_up.select(polled))
        self._is_drained = not polled.next_offsets
        return self._intake.take(is_drained=self._is_drained)

    def find(self) -> None:
        """Place the source where the intake goes on. Raises LogReplaced, BusError."""
        self._position.find()

    def restart(self, order: Announcement) -> bool:
        """Whether it goes on where this order says. Raises BusError."""
        has_moved = self._position.restart(order)
        if has_moved:
            self._catch_up.resume(())
        return has_moved

    def _poll(self) -> PolledRecords:
        """Raises BusError, LogReplaced."""
        try:
            return self._source.poll(POLL_RECORDS, POLL_TIMEOUT_S)
        except OffsetOutOfRange as exc:
            logger.warning("what is to be learned next is not in the log: %s", exc)
            self.find()
            return self._source.poll(POLL_RECORDS, POLL_TIMEOUT_S)
