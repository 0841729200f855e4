"""Catching up: a learner that lags too far behind the log learns a share of the requests, chosen by a hash.

When a snapshot is made while too many messages wait, its manifest gets a range of the log, from where reading stands
to the end of the log, and the share of the requests that is learned of it. A hash of the request id decides, so all
segments of a request inside the range are treated alike, every process decides alike, and every tenant keeps its
share. The other records stay in the log and are counted as `sampled_out`. The next range is decided once this one is
learned. Ranges are decided at snapshots alone and saved in them, so a run that resumes from a snapshot learns the
same records as one that went on, and the audit can tell for every offset whether it was to be learned.
"""

import logging
import time
from contextlib import suppress
from itertools import groupby

from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.record_disposition import is_sampled_out
from omnidraft.distill.ingest.trace_consumer import SKIPPED, PolledRecords, RecordAt, Skipped, TraceConsumer
from omnidraft.errors import BusError
from omnidraft.ports import SAMPLED_OUT, Metrics, Offsets
from omnidraft.snapshots.manifest import SampledRange

CHECK_S = 2.0
"""Seconds between two reads of the end of the log."""
LAG = "omnidraft_log_lag_records"

logger = logging.getLogger(__name__)


class CatchUp:
    """The sampling of one learner, between its consumer and its batcher."""

    def __init__(
        self,
        consumer: TraceConsumer,
        batcher: Batcher,
        metrics: Metrics,
        *,
        max_records: int | None,
        sample_records: int,
    ) -> None:
        """
        Args:
            max_records: messages that may wait; None or 0: any number.
            sample_records: about so many messages of a range are learned.
        """
        self._consumer, self._batcher, self._metrics = consumer, batcher, metrics
        self._max_records, self._sample_records = max_records, sample_records
        self._ranges: tuple[SampledRange, ...] = ()
        self._ends: Offsets = {}
        self._next_update_s = 0.0

    @property
    def ranges(self) -> tuple[SampledRange, ...]:
        """The ranges that reach beyond the offsets of the newest snapshot, for the next manifest."""
        return self._ranges

    def resume(self, ranges: tuple[SampledRange, ...]) -> None:
        """Go on with these ranges only."""
        self._ranges = ranges
        self._ends = {}

    def published(self) -> None:
        """Forget the ranges that the snapshot just published has passed."""
        offsets = self._batcher.offsets()
        self._ranges = tuple(each for each in self._ranges if each.reaches_beyond(offsets))

    def filter(self, polled: PolledRecords) -> PolledRecords:
        """Return the poll with the records that are not to be learned among the skipped ones."""
        records, skipped = list[RecordAt](), list[Skipped]()
        for (partition, is_out), run in groupby(polled.records, lambda each: (each[0], self._is_sampled_out(each))):
            run_records = list(run)
            if is_out:
                skipped.append((partition, run_records[-1][1], SAMPLED_OUT, len(run_records)))
                self._metrics.add(SKIPPED, len(run_records), reason=SAMPLED_OUT)
            else:
                records += run_records
        return PolledRecords(tuple(records), polled.next_offsets, (*polled.skipped, *skipped))

    def maybe_begin_range(self) -> None:
        """Begin a range when too many messages wait and none is under way. Called for every snapshot, before it."""
        offsets, read_to = self._batcher.offsets(), self._batcher.read_to
        num_waiting, num_unread = sum(self._lag(offsets).values()), sum(self._lag(read_to).values())
        is_behind = self._max_records and num_waiting > self._max_records and num_unread > self._sample_records
        if not is_behind or any(each.reaches_beyond(offsets) for each in self._ranges):
            return
        share = self._sample_records / num_unread
        self._ranges += (SampledRange(start=dict(read_to), end=dict(self._ends), share=share),)
        logger.warning(
            "learning lags: %d messages wait, more than %d, so %.3g %% of the requests up to %s are learned",
            num_waiting,
            self._max_records,
            100 * share,
            self._ends,
        )

    def update_lag(self) -> None:
        """Read where the log ends and update the lag gauge, at most every CHECK_S seconds."""
        if time.monotonic() < self._next_update_s:
            return
        self._next_update_s = time.monotonic() + CHECK_S
        with suppress(BusError):  # the next poll reports it
            self._ends = self._consumer.end_offsets()
            for partition, lag in self._lag(self._batcher.offsets()).items():
                self._metrics.set(LAG, lag, partition=str(partition))

    def _is_sampled_out(self, record_at: RecordAt) -> bool:
        partition, offset, record = record_at
        return any(each.holds(partition, offset) and is_sampled_out(record, each.share) for each in self._ranges)

    def _lag(self, offsets: Offsets) -> dict[int, int]:
        return {partition: max(0, end - offsets.get(partition, 0)) for partition, end in self._ends.items()}
