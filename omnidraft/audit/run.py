"""One audit from end to end: replay the log, and compare what it says with every snapshot."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from omnidraft.audit.dedup_window import DedupWindow
from omnidraft.audit.findings import Fault, PartitionFigures, Report
from omnidraft.audit.log_replay import Letters, LogReplay
from omnidraft.audit.snapshot_deltas import SnapshotDelta, compare, snapshot_deltas
from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.dead_letters import DeadLetter
from omnidraft.distill.ingest.log_position import EXPIRED
from omnidraft.distill.ingest.record_disposition import Disposition
from omnidraft.distill.ingest.trace_consumer import (
    DAMAGE_REASONS,
    DEAD_LETTER_REASONS,
    OTHER_PAIR,
    POISON,
    PolledRecords,
    TraceConsumer,
)
from omnidraft.ports import Offsets, Outgoing, SnapshotVersion

_FATES = {Disposition.HELD_OUT.value, Disposition.DUPLICATE.value, Disposition.SAMPLED_OUT.value}
APART = {*_FATES, OTHER_PAIR, POISON, EXPIRED, *DEAD_LETTER_REASONS, *DAMAGE_REASONS}
"""Counts of a manifest that stand for one offset each, beside the reasons that dead letters name."""


class Unwritten:
    """A LogWriter for a source whose dead letters were written long ago."""

    def append(self, messages: Sequence[Outgoing]) -> None:
        """Nothing: the audit looks for the letters that are there."""

    def close(self) -> None: ...


def letters_of(topic: str, letters: Iterable[DeadLetter]) -> Letters:
    """Origin and reason of those that come from this topic."""
    from_topic = (letter for letter in letters if letter.origin_topic == topic)
    return {
        (letter.origin[0], offset): sys.intern(letter.reason)
        for letter in from_topic
        if letter.origin
        for offset in range(letter.origin[1], letter.origin[1] + letter.num_messages)
    }


def audit(
    source: TraceConsumer,
    log_ends: Offsets,
    versions: Sequence[SnapshotVersion],
    letters: Letters,
    *,
    remembered: Set[int] | None,
    held_out_every: int,
    saw: Callable[[int], None] = lambda num_messages: None,
    idle_s: float = topic_scan.IDLE_S,
) -> Report:
    """Account for every offset before the newest snapshot's.

    Args:
        source: of the pair, over the whole log; its dead letters go to `Unwritten`.
        log_ends: taken after `versions`, `letters` after both.
        remembered: names in the newest snapshot's intake; None when they are not known.
        held_out_every: as while learning.
        saw: told how many messages each poll gave.

    Raises:
        BusError: the log cannot be read.
    """
    found = snapshot_deltas(versions, APART | set(letters.values()))
    names = None if remembered is None else DedupWindow(remembered)
    walk = LogReplay(found, letters, names, held_out_every=held_out_every)
    for polled in _polls(source, walk.end, log_ends, saw, idle_s):
        walk.update(polled)
    walk.finish(log_ends)
    faults = (*walk.faults, *_contradictions(found, walk))
    version = versions[-1].version if versions else None
    num_expired = sum(stage.told.get(EXPIRED, 0) for stage in found)
    return Report(version, len(found), tuple(_partitions(walk, log_ends)), faults, num_expired)


def _polls(
    source: TraceConsumer, ends: Offsets, log_ends: Offsets, saw: Callable[[int], None], idle_s: float
) -> Iterator[PolledRecords]:
    """From the beginning of the log to these ends."""
    there = {partition: min(end, log_ends.get(partition, 0)) for partition, end in ends.items()}
    source.seek({})
    return topic_scan.polls_until(lambda: _poll(source, saw), there, idle_s=idle_s)


def _poll(source: TraceConsumer, saw: Callable[[int], None]) -> PolledRecords:
    polled = source.poll(topic_scan.POLL_MESSAGES, topic_scan.POLL_TIMEOUT_S)
    saw(len(polled.records) + sum(number for *_, number in polled.skipped))
    return polled


def _contradictions(found: Sequence[SnapshotDelta], walk: LogReplay) -> Iterator[Fault]:
    for place, stage in enumerate(found):
        counts = sum((number for (its, _), number in walk.found.items() if its == place), Counter[str]())
        num_gone, num_known_lost = walk.num_gone[place], walk.num_known_lost[place]
        yield from compare(stage, counts, num_gone=num_gone, num_known_lost=num_known_lost)


def _partitions(walk: LogReplay, log_ends: Offsets) -> Iterator[PartitionFigures]:
    for partition, log_end in sorted(log_ends.items()):
        fates = sum((number for (_, its), number in walk.found.items() if its == partition), Counter[str]())
        first, end = walk.first.get(partition, 0), walk.end.get(partition, 0)
        yield PartitionFigures(partition, first, end, log_end, dict(sorted(fates.items())))
