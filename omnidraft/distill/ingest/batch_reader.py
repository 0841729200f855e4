"""The batch reader: it polls the log into the batcher, without the records that a lagging learner leaves out."""

import logging
from collections.abc import Callable
from typing import Any

from omnidraft.distill.ingest.batcher import Batch, Batcher
from omnidraft.distill.ingest.catch_up import CatchUp
from omnidraft.distill.ingest.log_position import LogPosition
from omnidraft.distill.ingest.trace_consumer import PolledRecords, TraceConsumer
from omnidraft.distill.ingest.truncation_mark import TruncationMark
from omnidraft.errors import LogReplaced, LogTruncated, OffsetOutOfRange
from omnidraft.ports import Announcement, Metrics
from omnidraft.snapshots.manifest import Manifest

POLL_RECORDS = 64
POLL_TIMEOUT_S = 0.5

logger = logging.getLogger(__name__)

RetriedPoll = Callable[[Callable[[], PolledRecords]], PolledRecords]
"""A function that calls the poll until the log answers."""


class BatchReader:
    """The batches of one learner. Not thread-safe."""

    def __init__(
        self,
        consumer: TraceConsumer,
        batcher: Batcher,
        metrics: Metrics,
        truncation: TruncationMark | None = None,
        *,
        max_records: int | None,
        sample_records: int,
    ) -> None:
        """`max_records`, `sample_records`: see catch_up.py."""
        self._consumer, self._batcher = consumer, batcher
        self._catch_up = CatchUp(consumer, batcher, metrics, max_records=max_records, sample_records=sample_records)
        self.position = LogPosition(consumer, batcher, metrics, truncation)
        self._is_drained = False

    def resume(self, manifest: Manifest) -> None:
        """Go on from this snapshot; the batcher is resumed apart."""
        self.position.resume(manifest)
        self._catch_up.resume(manifest.lag_samples)

    def begin_snapshot(self) -> dict[str, Any]:
        """Decide what holds from the next snapshot on, and return its manifest's fields about the log."""
        self._batcher.admit_partitions()
        self._catch_up.maybe_begin_range()
        return {
            **self.position.manifest_fields(),
            "offsets": self._batcher.offsets(),
            "held_out_records": len(self._batcher.held_out),
            "lag_samples": self._catch_up.ranges,
        }

    def end_snapshot(self) -> None:
        """Note that the snapshot is published."""
        self._catch_up.published()

    def next_batch(self, with_retries: RetriedPoll) -> Batch | None:
        """Return the next batch; None after a poll that did not complete one.

        Raises:
            LogReplaced: an operator has to say where to go on. Whatever `with_retries` raises, too.
        """
        self._catch_up.update_lag()
        batch = self._batcher.take(is_drained=self._is_drained)
        if batch is not None or not self._batcher.has_capacity:
            return batch
        polled = with_retries(self._poll)
        self._batcher.add(self._catch_up.filter(polled))
        self._is_drained = not polled.next_offsets
        return self._batcher.take(is_drained=self._is_drained)

    def seek(self) -> None:
        """Place the consumer where the batcher goes on. Raises LogReplaced, BusError."""
        self.position.seek()

    def restart(self, order: Announcement) -> bool:
        """Return whether reading goes on where this order says. Raises BusError."""
        has_moved = self.position.restart(order)
        if has_moved:
            self._catch_up.resume(())
        return has_moved

    def _poll(self) -> PolledRecords:
        """Raises BusError, LogReplaced."""
        try:
            return self._poll_once()
        except OffsetOutOfRange as exc:
            logger.warning("the next offsets to learn are not in the log: %s", exc)
        self.seek()
        return self._poll_once()

    def _poll_once(self) -> PolledRecords:
        """Raises BusError; LogReplaced when messages that were read are gone, which the log tells once."""
        try:
            return self._consumer.poll(POLL_RECORDS, POLL_TIMEOUT_S)
        except LogTruncated as exc:
            self.position.suspect(str(exc))
            raise LogReplaced(str(exc)) from exc
