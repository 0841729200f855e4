"""The audit of one pair: it replays the log and compares the result with every snapshot."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from omnidraft.audit.findings import Fault, PartitionReport, Report
from omnidraft.audit.log_replay import DeadLetterReasons, LogReplay
from omnidraft.audit.snapshot_deltas import SnapshotDelta, compare, snapshot_deltas
from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.dead_letters import DeadLetter
from omnidraft.distill.ingest.record_disposition import SEEN_RECORDS, Disposition
from omnidraft.distill.ingest.trace_consumer import PolledRecords, TraceConsumer
from omnidraft.ports import EXPIRED, SKIP_REASONS, Offsets, Outgoing, SnapshotVersion

COUNTED_OFFSETS = {Disposition.HELD_OUT.value, Disposition.DUPLICATE.value, *SKIP_REASONS}
"""Names of manifest counts that stand for one offset each, beside the reasons in dead letters."""


class DiscardingWriter:
    """A LogWriter for a consumer whose dead letters were written by the learner."""

    def append(self, messages: Sequence[Outgoing]) -> None:
        """Do nothing: the audit reads the dead letters that are there."""

    def close(self) -> None: ...


def dead_letter_reasons(topic: str, dead_letters: Iterable[DeadLetter]) -> DeadLetterReasons:
    """Return the reason of every offset of this topic that a dead letter stands for."""
    from_topic = (letter for letter in dead_letters if letter.origin_topic == topic)
    return {
        (letter.origin[0], offset): sys.intern(letter.reason)
        for letter in from_topic
        if letter.origin
        for offset in range(letter.origin[1], letter.origin[1] + letter.num_messages)
    }


def audit(
    consumer: TraceConsumer,
    log_ends: Offsets,
    versions: Sequence[SnapshotVersion],
    dead_letters: DeadLetterReasons,
    *,
    seen_keys: Set[int] | None,
    held_out_every: int,
    seen_records: int = SEEN_RECORDS,
    on_poll: Callable[[int], None] = lambda num_messages: None,
    idle_s: float = topic_scan.IDLE_S,
) -> Report:
    """Account for every offset before the newest snapshot's.

    Args:
        consumer: of the pair, over the whole log; its dead letters go to a `DiscardingWriter`.
        log_ends: read after `versions`, `dead_letters` after both.
        seen_keys: keys in the newest snapshot's batcher; None when they are not known.
        held_out_every: as while learning; `seen_records` too.
        on_poll: called with the number of messages of each poll.

    Raises:
        BusError: the log cannot be read.
    """
    deltas = snapshot_deltas(versions, COUNTED_OFFSETS | set(dead_letters.values()))
    options = {"held_out_every": held_out_every, "seen_records": seen_records}
    replay = LogReplay(deltas, dead_letters, seen_keys=seen_keys, **options)
    for polled in _polls(consumer, replay.end, log_ends, on_poll, idle_s):
        replay.update(polled)
    replay.finish(log_ends)
    faults = (*replay.faults, *_contradictions(deltas, replay))
    version = versions[-1].version if versions else None
    num_expired = sum(delta.counts.get(EXPIRED, 0) for delta in deltas)
    return Report(version, len(deltas), tuple(_partitions(replay, log_ends)), faults, num_expired)


def _polls(
    consumer: TraceConsumer, ends: Offsets, log_ends: Offsets, on_poll: Callable[[int], None], idle_s: float
) -> Iterator[PolledRecords]:
    """Yield polls from the beginning of the log to these ends."""
    there = {partition: min(end, log_ends.get(partition, 0)) for partition, end in ends.items()}
    consumer.seek({})
    return topic_scan.polls_until(lambda: _poll(consumer, on_poll), there, idle_s=idle_s)


def _poll(consumer: TraceConsumer, on_poll: Callable[[int], None]) -> PolledRecords:
    polled = consumer.poll(topic_scan.POLL_MESSAGES, topic_scan.POLL_TIMEOUT_S)
    on_poll(len(polled.records) + sum(number for *_, number in polled.skipped))
    return polled


def _contradictions(deltas: Sequence[SnapshotDelta], replay: LogReplay) -> Iterator[Fault]:
    for index, delta in enumerate(deltas):
        counts = sum((number for (its, _), number in replay.dispositions.items() if its == index), Counter[str]())
        num_gone, num_known_lost = replay.num_gone[index], replay.num_known_lost[index]
        yield from compare(delta, counts, num_gone=num_gone, num_known_lost=num_known_lost)


def _partitions(replay: LogReplay, log_ends: Offsets) -> Iterator[PartitionReport]:
    for partition, log_end in sorted(log_ends.items()):
        fates = sum((number for (_, its), number in replay.dispositions.items() if its == partition), Counter[str]())
        first, end = replay.first.get(partition, 0), replay.end.get(partition, 0)
        yield PartitionReport(partition, first, end, log_end, dict(sorted(fates.items())))
