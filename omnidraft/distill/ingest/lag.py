"""When the learner lags behind the log, it learns a sample of the newest traffic and says so.

Reading is cheap and learning is not. Once more messages wait than allowed, the learner reads on to the end of the log,
keeps a sample of what it passes (even_sample.py: newest first, evenly over tenants), and learns that as if nothing else
had been there. Offsets stay where they are until the end is reached, and then move with the sample: a crash in between
costs the reading, and counts are exact at every snapshot. The next sample begins when this one is learned.
"""

import logging
import time

from omnidraft.distill.ingest.backlog_sampler import BacklogSampler
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.record_disposition import Disposition
from omnidraft.distill.ingest.trace_consumer import SKIPPED, PolledRecords, TraceConsumer
from omnidraft.errors import BusError
from omnidraft.ports import Metrics, Offsets
from omnidraft.snapshots.manifest import LagSample

CHECK_S = 2.0
"""Between two looks at the end of the log."""
LAG = "omnidraft_log_lag_records"

logger = logging.getLogger(__name__)


class Lag:
    """Between a source and its intake."""

    def __init__(
        self,
        source: TraceConsumer,
        intake: Batcher,
        metrics: Metrics,
        *,
        max_records: int | None,
        sample_records: int,
    ) -> None:
        """
        Args:
            max_records: messages that may wait; None or 0: any number.
            sample_records: kept of those that were passed.
        """
        self._source, self._intake, self._metrics = source, intake, metrics
        self._max_records, self._sample_records = max_records, sample_records
        self._passing: BacklogSampler | None = None
        self._samples: list[LagSample] = []  # whose records the newest snapshot's offsets are not past
        self._look_at_s = 0.0
        self._began_s = 0.0

    @property
    def samples(self) -> tuple[LagSample, ...]:
        """Those of what was learned since the newest snapshot."""
        return tuple(self._samples)

    def published(self) -> None:
        """A snapshot with the intake's offsets is there."""
        self._samples = self._unlearned()

    def is_sampling(self) -> bool:
        """Whether records are being passed now; looks at the end of the log every CHECK_S."""
        if self._passing is None and time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + CHECK_S
            self._look()
        return self._passing is not None

    def add(self, polled: PolledRecords) -> None:
        """What a poll gave: into the intake, or past it."""
        if self._passing is None:
            self._intake.add(polled)
            return
        self._passing.update(polled)
        if self._passing.has_reached_the_end() or not polled.next_offsets:
            self._finish(self._passing)
            self._passing = None

    def abandon(self) -> None:
        """Forget the passing under way; the source is about to be placed at the intake's offsets again."""
        self._passing = None

    def _look(self) -> None:
        try:
            ends = self._source.end_offsets()
        except BusError:  # the next poll says so
            return
        offsets = self._intake.offsets()
        for partition, end in ends.items():
            self._metrics.set(LAG, max(0, end - offsets.get(partition, 0)), partition=str(partition))
        num_waiting = self._num_unread(ends) + self._intake.num_waiting
        is_behind = self._max_records is not None and 0 < self._max_records < num_waiting
        if is_behind and not self._unlearned() and not self._intake.has_gap:
            self._begin(ends, num_waiting)

    def _num_unread(self, ends: Offsets) -> int:
        read_to = self._intake.read_to
        return sum(max(0, end - read_to.get(partition, 0)) for partition, end in ends.items())

    def _unlearned(self) -> list[LagSample]:
        """Samples of which records still wait in the intake."""
        offsets = self._intake.offsets()
        return [
            sample
            for sample in self._samples
            if any(offsets.get(partition, 0) < end for partition, end in sample.end.items())
        ]

    def _begin(self, ends: Offsets, num_waiting: int) -> None:
        logger.info("%d messages wait, more than %d: reading to the end of the log", num_waiting, self._max_records)
        self._began_s = time.monotonic()
        start = self._intake.offsets()
        self._passing = BacklogSampler(start, ends, num_kept=self._sample_records)
        self._passing.update(self._intake.unread())

    def _finish(self, passing: BacklogSampler) -> None:
        num_out = passing.num_passed - passing.num_kept
        self._intake.add_sample(passing.kept(), passing.skipped(), passing.range().end)
        self._samples.append(passing.range())
        if num_out:
            self._metrics.add(SKIPPED, num_out, reason=Disposition.SAMPLED_OUT.value)
        logger.warning(
            "learning lags: of %d records passed in %.1f s the newest %d of %d tenants are learned, %d are not",
            passing.num_passed,
            time.monotonic() - self._began_s,
            passing.num_kept,
            passing.num_tenants,
            num_out,
        )
