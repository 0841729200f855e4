"""From the log to batches: polls go into the batcher, without the records that a lagging learner leaves out."""

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

RetriedPoll = Callable[[Callable[[], PolledRecords]], PolledRecords]
"""A function that calls the poll until the log answers."""


class BatchReader:
    """The batches of one learner. Not thread-safe."""

    def __init__(self, consumer: TraceConsumer, batcher: Batcher, catch_up: CatchUp, position: LogPosition) -> None:
        self._consumer, self._batcher, self._catch_up, self._position = consumer, batcher, catch_up, position
        self._is_drained = False

    def next_batch(self, with_retries: RetriedPoll) -> Batch | None:
        """Return a full batch; None after a poll that did not complete one.

        Raises:
            LogReplaced: an operator has to say where to go on. Whatever `with_retries` raises, too.
        """
        self._catch_up.look()
        batch = self._batcher.take(is_drained=self._is_drained)
        if batch is not None or not self._batcher.has_capacity:
            return batch
        polled = with_retries(self._poll)
        self._batcher.add(self._catch_up.select(polled))
        self._is_drained = not polled.next_offsets
        return self._batcher.take(is_drained=self._is_drained)

    def seek(self) -> None:
        """Place the consumer where the batcher goes on. Raises LogReplaced, BusError."""
        self._position.seek()

    def restart(self, order: Announcement) -> bool:
        """Return whether reading goes on where this order says. Raises BusError."""
        has_moved = self._position.restart(order)
        if has_moved:
            self._catch_up.resume(())
        return has_moved

    def _poll(self) -> PolledRecords:
        """Raises BusError, LogReplaced."""
        try:
            return self._consumer.poll(POLL_RECORDS, POLL_TIMEOUT_S)
        except OffsetOutOfRange as exc:
            logger.warning("the next offsets to learn are not in the log: %s", exc)
            self.seek()
            return self._consumer.poll(POLL_RECORDS, POLL_TIMEOUT_S)
