"""The position from which the learner reads on, also when the log has changed.

Messages that expired before they were read: go on at the oldest, and count the others as `expired`, as many as there
are offsets between. A log that ends before the offsets already learned, or lost messages that were read, or another one
under the same name: only an operator knows which of its messages were learned, so report it, and wait for the order to
restart somewhere.
What a log lost or had restored while nobody read it cannot be seen here once it has grown past these offsets again;
`traces verify` shows it.

The truncation mark is a file that tells the next process that the log lost messages that were read. That process
cannot see it by itself: others may have their offsets by then, and the log may end beyond all that was learned.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnidraft import files
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.trace_consumer import SKIPPED, PolledRecords, TraceConsumer
from omnidraft.errors import LogReplaced
from omnidraft.ports import EXPIRED, Metrics, Offsets, Restart
from omnidraft.snapshots.manifest import Manifest

logger = logging.getLogger(__name__)


class TruncationMark:
    """The mark of one distiller; the folder of `path` must outlive its process."""

    def __init__(self, path: Path | None = None) -> None:
        """Go on with the mark of the process before. Without a path no other process learns of it."""
        self._path = path
        self.error = path.read_text(errors="replace") if path is not None and path.exists() else None
        """The error by which the log told of the loss; None: no loss is known, or an operator said where to go on."""

    def set(self, error: str | None) -> None:
        """Note the error, or that it is settled; on disk when this returns. A disk that refuses it stops nothing."""
        if error == self.error:
            return
        self.error = error
        try:
            self._save()
        except OSError as exc:
            logger.warning("%s cannot be written, so the next process will not know of this: %s", self._path, exc)

    def _save(self) -> None:
        if self._path is None:
            return
        if self.error is None:
            self._path.unlink(missing_ok=True)
            return
        files.make_folder(self._path.parent)
        files.write_text(self._path, self.error)


ADVICE = (
    "name the log that it learned from (log.url), restore that one whole, or say where to go on in this one: "
    "`omnidraft learning restart --from earliest` learns all that it holds, `--from latest` what comes from now on, "
    '`--from "0:120 1:96"` from these offsets'
)


class LogPosition:
    """The position of a consumer and its batcher, the identity of their log, and the restarts carried out."""

    def __init__(
        self, consumer: TraceConsumer, batcher: Batcher, metrics: Metrics, truncation: TruncationMark | None = None
    ) -> None:
        self._consumer, self._batcher, self._metrics = consumer, batcher, metrics
        self._truncation = truncation or TruncationMark()
        self._log_id: str | None = None
        self._restarts: tuple[str, ...] = ()

    def resume(self, manifest: Manifest) -> None:
        """Go on from this snapshot."""
        self._log_id, self._restarts = manifest.log_id, manifest.restarts

    def manifest_fields(self) -> Mapping[str, Any]:
        """Return fields of the next manifest."""
        return {"log_id": self._log_id, "restarts": self._restarts}

    def suspect(self, error: str) -> None:
        """Note that the log lost messages that were read: reading does not go on, nor does it in the next process,
        before an operator says where."""
        self._truncation.set(error)

    def seek(self) -> None:
        """Place the consumer where the batcher goes on.

        Raises:
            LogReplaced: as far as can be seen, this is not the log of the batcher's offsets.
            BusError: the log cannot be read.
        """
        read_to = {partition: offset for partition, offset in self._batcher.read_to.items() if offset}
        if read_to and self._truncation.error is not None:
            raise LogReplaced(f"the log lost messages that were read: {self._truncation.error}; {self._where_to()}")
        log_id, firsts, ends = self._consumer.identity(), self._consumer.first_offsets(), self._consumer.end_offsets()
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

    def restart(self, order: Restart) -> bool:
        """Return whether reading goes on where this order says; if the log has no such offsets, the order is ignored.

        Raises:
            BusError: the log cannot be read.
        """
        log_id, firsts, ends = self._consumer.identity(), self._consumer.first_offsets(), self._consumer.end_offsets()
        offsets = _ordered(order.start, firsts, ends)
        held = " ".join(f"{partition}:{first}-{ends[partition]}" for partition, first in sorted(firsts.items()))
        if not all(firsts.get(each, 1) <= offset <= ends.get(each, 0) for each, offset in offsets.items()):
            logger.error("learning is not restarted at %s: the log holds %s; order other offsets", order.start, held)
            self.mark_done(order)
            return False
        self._consumer.seek(offsets)
        before = self._batcher.offsets()
        self._batcher.restart_at(offsets)
        self.mark_done(order)
        self._log_id = log_id
        self._truncation.set(None)
        logger.warning("learning restarts at %s instead of %s, as ordered; the log holds %s", offsets, before, held)
        return True

    def _where_to(self) -> str:
        """Return the advice for a log that lost messages. What is read and not learned yet would be read again."""
        learned_to = " ".join(f"{partition}:{offset}" for partition, offset in sorted(self._batcher.offsets().items()))
        return (
            f'order `omnidraft learning restart --from "{learned_to}"`, up to where it is learned; of a partition for '
            "which the error names a lower offset, order that one"
        )

    def _skip_expired(self, expired: Offsets, read_to: Offsets) -> None:
        numbers = {partition: first - read_to.get(partition, 0) for partition, first in expired.items()}
        skipped = [(partition, expired[partition] - 1, EXPIRED, number) for partition, number in numbers.items()]
        self._batcher.add(PolledRecords((), expired, tuple(skipped)))
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
