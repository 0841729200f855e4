"""Ingest: from the log to batches, from the offsets that the newest snapshot has learned up to.

Messages that expired before they were read: go on at the oldest, and count the others as `expired`, as many as there
are offsets between. A log that ends before the offsets already learned, or lost messages that were read, or another one
under the same name: only an operator knows which of its messages were learned, so report it, and wait for the order to
restart somewhere. What a log lost or had restored while nobody read it cannot be seen here once it has grown past these
offsets again; `traces verify` shows it.

When too many messages wait, reading goes on at the newest. That is decided at snapshots alone: the messages between are
counted as `passed_over` and stay in the log, and the snapshot that follows has both offsets. So a run that resumes from
it goes on where this one does, and the audit knows of every offset whether it was to be learned.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from omnidraft.distill.ingest.batch import Batch
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.trace_consumer import SKIPPED, PolledRecords, TraceConsumer
from omnidraft.distill.ingest.truncation_mark import TruncationMark
from omnidraft.errors import BusError, LogReplaced, LogTruncated, OffsetOutOfRange
from omnidraft.ports import EXPIRED, PASSED_OVER, Metrics, Offsets, Restart
from omnidraft.snapshots.manifest import Manifest

POLL_RECORDS = 64
POLL_TIMEOUT_S = 0.5
CHECK_S = 2.0
"""Seconds between two reads of the end of the log."""
LAG = "omnidraft_log_lag_records"
KEPT_SHARE = 0.1
"""Of `max_lag_records`, the newest that are kept when more wait. A learner that never keeps up so learns in order for a
while, and young records, before it passes over some again."""
ADVICE = (
    "name the log that it learned from (log.url), restore that one whole, or say where to go on in this one: "
    "`omnidraft learning restart --from earliest` learns all that it holds, `--from latest` what comes from now on, "
    '`--from "0:120 1:96"` from these offsets'
)

logger = logging.getLogger(__name__)

RetriedPoll = Callable[[Callable[[], PolledRecords]], PolledRecords]
"""A function that calls the poll until the log answers."""


class Ingest:
    """The batches of one learner. Not thread-safe."""

    def __init__(
        self,
        consumer: TraceConsumer,
        batcher: Batcher,
        metrics: Metrics,
        truncation: TruncationMark | None = None,
        *,
        max_lag_records: int = 0,
    ) -> None:
        """`max_lag_records`: messages that may wait; 0: any number."""
        self._consumer, self.batcher, self._metrics = consumer, batcher, metrics
        self._truncation, self._max_lag_records = truncation or TruncationMark(), max_lag_records
        self._log_id: str | None = None
        self._restarts: tuple[str, ...] = ()
        self._ends: Offsets = {}
        self._next_update_s = 0.0
        self._is_drained = False
        self._catching_up_to: Offsets = {}

    def resume(self, manifest: Manifest) -> None:
        """Go on in the log of this snapshot, and repeat no restart; the batcher is resumed apart, and `seek` is due."""
        self._log_id, self._ends, self._catching_up_to = manifest.log_id, {}, manifest.catching_up_to
        self._restarts = tuple(dict.fromkeys((*manifest.restarts, *self._restarts)))

    def farthest_offsets(self) -> Offsets:
        """Return the offsets that learning has been at: those of the batcher, or further while it is catching up."""
        offsets, goal = self.batcher.offsets(), self._catching_up_to
        return {each: max(offsets.get(each, 0), goal.get(each, 0)) for each in {*offsets, *goal}}

    def catch_up(self, offsets: Offsets) -> None:
        """Let no snapshot be a challenger before everything up to these offsets is learned again."""
        self._catching_up_to = offsets

    def ends_catching_up(self) -> bool:
        """Return whether everything is learned again now, as the log holds no further batch; once."""
        is_over = self._is_drained and bool(self._catching_up_to)
        if is_over:
            self._catching_up_to = {}
        return is_over

    def log_fields(self) -> dict[str, Any]:
        """Return fields of the next manifest."""
        return {"log_id": self._log_id, "restarts": self._restarts}

    def begin_snapshot(self) -> dict[str, Any]:
        """Decide what holds from the next snapshot on, and return its manifest's fields about the log.

        Where it has passed over messages, `seek` is due before the next batch.
        """
        self.batcher.admit_partitions()
        passed_over = {} if self._catching_up_to else self._pass_over()
        offsets = self.batcher.offsets()
        if all(offsets.get(partition, 0) >= offset for partition, offset in self._catching_up_to.items()):
            self._catching_up_to = {}
        return {
            **self.log_fields(),
            "offsets": offsets,
            "catching_up_to": self._catching_up_to,
            "held_out_records": len(self.batcher.held_out),
            "passed_over": passed_over,
        }

    def next_batch(self, with_retries: RetriedPoll) -> Batch | None:
        """Return the next batch; None after a poll that did not complete one.

        Raises:
            LogReplaced: an operator has to say where to go on. Whatever `with_retries` raises, too.
        """
        self._update_lag()
        if (batch := self._take()) is not None:
            return batch
        polled = with_retries(self._poll)
        self.batcher.add(polled)
        self._is_drained = not polled.next_offsets and self._is_at_end()
        return self._take()

    def dead_letter_poison(self, batch: Batch) -> None:
        """Return when the poison of this batch is among the dead letters. Raises BusError; then it may be repeated."""
        if batch.poison:
            self._consumer.dead_letter(batch.poison)
            logger.warning("%d records are dead letters: the process crashed on them", len(batch.poison))

    def seek(self) -> None:
        """Place the consumer where the batcher goes on.

        Raises:
            LogReplaced: as far as can be seen, this is not the log of the batcher's offsets.
            BusError: the log cannot be read.
        """
        read_to = {partition: offset for partition, offset in self.batcher.read_to.items() if offset}
        if read_to and self._truncation.error is not None:
            raise LogReplaced(f"the log lost messages that were read: {self._truncation.error}; {self._where_to()}")
        log_id, firsts, ends = self.read_log()
        require_same_log(self._log_id, log_id, read_to, ends)
        expired = {partition: first for partition, first in firsts.items() if first > read_to.get(partition, 0)}
        self._consumer.seek(read_to | expired)
        self._skip_expired(expired, read_to)
        self._log_id = log_id
        self._truncation.set(None)  # it was of learning that has begun anew since

    def is_new(self, order: Restart) -> bool:
        """Return whether this restart was neither carried out nor ignored."""
        return order.id not in self._restarts

    def mark_done(self, order: Restart | None) -> None:
        """Note that this order was carried out, or is not to be."""
        if order is not None:
            self._restarts = (*self._restarts, order.id)

    def ordered_offsets(self, order: Restart) -> Offsets | None:
        """Return the offsets of every partition where this order says that learning goes on; None: the log has no such
        ones. Raises BusError."""
        _, firsts, ends = self.read_log()
        offsets = _ordered(order.start, firsts, ends)
        held = " ".join(f"{partition}:{first}-{ends[partition]}" for partition, first in sorted(firsts.items()))
        if all(firsts.get(each, 1) <= offset <= ends.get(each, 0) for each, offset in offsets.items()):
            logger.warning("learning restarts at %s, as ordered; the log holds %s", offsets, held)
            return offsets
        logger.error("learning is not restarted at %s: the log holds %s; order other offsets", order.start, held)
        return None

    def restart_at(self, offsets: Offsets) -> None:
        """Go on at these offsets, whatever log they are of; `seek` is due."""
        self.batcher.restart_at(offsets)
        self._log_id, self._ends, self._catching_up_to = None, {}, {}
        self._truncation.set(None)

    def read_log(self) -> tuple[str, Offsets, Offsets]:
        """Return the log's identity, and the first offset and the end of every partition. Raises BusError."""
        return self._consumer.identity(), self._consumer.first_offsets(), self._consumer.end_offsets()

    def _take(self) -> Batch | None:
        return self.batcher.take(is_drained=self._is_drained, ends=self._ends)

    def _pass_over(self) -> Offsets:
        """Go on at the newest messages if too many wait; return the first offset of each partition that is left out."""
        waiting = self._lag()
        num_waiting = sum(waiting.values())
        if not self._max_lag_records or num_waiting <= self._max_lag_records:
            return {}
        share = KEPT_SHARE * self._max_lag_records / num_waiting
        offsets = {partition: self._ends[partition] - int(share * number) for partition, number in waiting.items()}
        firsts = self.batcher.pass_over(offsets)
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

    def _is_at_end(self) -> bool:
        """Return whether nothing is left to read: a poll may return nothing although there is."""
        with suppress(BusError):
            self._ends = self._consumer.end_offsets()
            return all(end <= self.batcher.read_to.get(partition, 0) for partition, end in self._ends.items())
        return False

    def _lag(self) -> dict[int, int]:
        """Return the number of messages of each partition that are to be learned, as far as the end is known."""
        offsets = self.batcher.offsets()
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
        """Raises BusError; LogReplaced when messages that were read are gone, which the log tells once: reading does
        not go on, nor does it in the next process, before an operator says where."""
        try:
            return self._consumer.poll(POLL_RECORDS, POLL_TIMEOUT_S)
        except LogTruncated as exc:
            self._truncation.set(str(exc))
            raise LogReplaced(str(exc)) from exc

    def _where_to(self) -> str:
        """Return the advice for a log that lost messages. What is read and not learned yet would be read again."""
        learned_to = " ".join(f"{partition}:{offset}" for partition, offset in sorted(self.batcher.offsets().items()))
        return (
            f'order `omnidraft learning restart --from "{learned_to}"`, up to where it is learned; of a partition for '
            "which the error names a lower offset, order that one"
        )

    def _skip_expired(self, expired: Offsets, read_to: Offsets) -> None:
        numbers = {partition: first - read_to.get(partition, 0) for partition, first in expired.items()}
        skipped = [(partition, expired[partition] - 1, EXPIRED, number) for partition, number in numbers.items()]
        self.batcher.add(PolledRecords((), expired, tuple(skipped)))
        for partition, number in numbers.items():
            self._metrics.add(SKIPPED, number, reason=EXPIRED)
            logger.warning(
                "%d messages of partition %d expired before they were learned (offsets %d to %d); learning goes on at "
                "the oldest that is left. Keep messages for longer than a learner is away: log.retention_hours",
                number,
                partition,
                expired[partition] - number,
                expired[partition] - 1,
            )


def require_same_log(known_id: str | None, log_id: str, offsets: Offsets, ends: Offsets) -> None:
    """Check that these offsets, which are of the log `known_id`, are offsets of the log `log_id`.

    Args:
        known_id: None when the identity of that log is not known.

    Raises:
        LogReplaced: they are not.
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
    """Return the offsets of every partition; one that the order does not name starts at its first message."""
    if start == "latest":
        return dict(ends)
    if start == "earliest":
        return dict(firsts)
    named = (each.split(":") for each in start.split())
    return {**firsts, **{int(partition): int(offset) for partition, offset in named}}
