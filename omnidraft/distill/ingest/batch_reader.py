"""The batch reader: it polls the log into the batcher, and goes on at the newest messages when too many wait.

That is decided at snapshots alone: the messages between the offsets so far and those to go on from are counted as
`passed_over` and stay in the log, and the snapshot that follows has both offsets. So a run that resumes from it goes on
where this one does, and the audit knows of every offset whether it was to be learned.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from omnidraft.distill.ingest.batcher import Batch, Batcher
from omnidraft.distill.ingest.log_position import LogPosition, TruncationMark
from omnidraft.distill.ingest.trace_consumer import SKIPPED, PolledRecords, TraceConsumer
from omnidraft.errors import BusError, LogReplaced, LogTruncated, OffsetOutOfRange
from omnidraft.ports import PASSED_OVER, Metrics, Offsets, Restart
from omnidraft.snapshots.manifest import Manifest

POLL_RECORDS = 64
POLL_TIMEOUT_S = 0.5
CHECK_S = 2.0
"""Seconds between two reads of the end of the log."""
LAG = "omnidraft_log_lag_records"
KEPT_SHARE = 0.1
"""Of `max_lag_records`, the newest that are kept when more wait. A learner that never keeps up so learns in order for a
while, and young records, before it passes over some again."""

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
        max_lag_records: int,
    ) -> None:
        """`max_lag_records`: messages that may wait; 0: any number."""
        self._consumer, self._batcher, self._metrics = consumer, batcher, metrics
        self._max_lag_records = max_lag_records
        self._ends: Offsets = {}
        self._next_update_s = 0.0
        self.position = LogPosition(consumer, batcher, metrics, truncation)
        self._is_drained = False

    def resume(self, manifest: Manifest) -> None:
        """Go on from this snapshot; the batcher is resumed apart."""
        self.position.resume(manifest)
        self._ends = {}

    def begin_snapshot(self) -> dict[str, Any]:
        """Decide what holds from the next snapshot on, and return its manifest's fields about the log.

        Where it has passed over messages, `seek` is due before the next batch.
        """
        self._batcher.admit_partitions()
        passed_over = self._pass_over()
        return {
            **self.position.manifest_fields(),
            "offsets": self._batcher.offsets(),
            "held_out_records": len(self._batcher.held_out),
            "passed_over": passed_over,
        }

    def next_batch(self, with_retries: RetriedPoll) -> Batch | None:
        """Return the next batch; None after a poll that did not complete one.

        Raises:
            LogReplaced: an operator has to say where to go on. Whatever `with_retries` raises, too.
        """
        self._update_lag()
        batch = self._batcher.take(is_drained=self._is_drained)
        if batch is not None or not self._batcher.has_capacity:
            return batch
        polled = with_retries(self._poll)
        self._batcher.add(polled)
        self._is_drained = not polled.next_offsets
        return self._batcher.take(is_drained=self._is_drained)

    def seek(self) -> None:
        """Place the consumer where the batcher goes on. Raises LogReplaced, BusError."""
        self.position.seek()

    def restart(self, order: Restart) -> bool:
        """Return whether reading goes on where this order says. Raises BusError."""
        has_moved = self.position.restart(order)
        if has_moved:
            self._ends = {}  # of the log as it was; the order says where to go on
        return has_moved

    def _pass_over(self) -> Offsets:
        """Go on at the newest messages if too many wait; return the first offset of each partition that is left out."""
        waiting = self._lag()
        num_waiting = sum(waiting.values())
        if not self._max_lag_records or num_waiting <= self._max_lag_records:
            return {}
        share = KEPT_SHARE * self._max_lag_records / num_waiting
        offsets = {partition: self._ends[partition] - int(share * number) for partition, number in waiting.items()}
        firsts = self._batcher.pass_over(offsets)
        num_passed = sum(offsets[partition] - first for partition, first in firsts.items())
        self._metrics.add(SKIPPED, num_passed, reason=PASSED_OVER)
        logger.warning(
            "learning lags: %d messages wait, more than %d, so %d are passed over and it goes on at %s",
            num_waiting,
            self._max_lag_records,
            num_passed,
            offsets,
        )
        return firsts

    def _update_lag(self) -> None:
        """Read where the log ends and update the lag gauge, at most every CHECK_S seconds."""
        if time.monotonic() < self._next_update_s:
            return
        self._next_update_s = time.monotonic() + CHECK_S
        with suppress(BusError):  # the next poll reports it
            self._ends = self._consumer.end_offsets()
            for partition, lag in self._lag().items():
                self._metrics.set(LAG, lag, partition=str(partition))

    def _lag(self) -> dict[int, int]:
        """Return the number of messages of each partition that are to be learned, as far as the end is known."""
        offsets = self._batcher.offsets()
        return {partition: max(0, end - offsets.get(partition, 0)) for partition, end in self._ends.items()}

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
