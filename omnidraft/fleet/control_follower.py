"""The reading end of the announcements: what changed since it was asked last."""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from omnidraft.errors import OffsetOutOfRange, WireError
from omnidraft.fleet.announcements import PARTITION, parse_announcement, subject
from omnidraft.ports import Announcement, AnnouncementKind, LogReader, Message, Metrics

logger = logging.getLogger(__name__)

MAX_MESSAGES = 1000


class LogControlFollower:
    """Reads the control topic from its first message on, and tells what holds now, each thing once.

    A worker follows `champion` and `canary`, the newest of which says what serves; a distiller `pause` and `resume`.
    We write to the first partition only. What stands in another comes after all that the first held by then, by the
    timestamps, and before what came to the first later.
    A log that lost its end or was created anew is read from its first message, and its sequences go on behind the
    highest of before, so that nobody takes what is new there for something stale.
    """

    def __init__(
        self,
        reader: LogReader,
        metrics: Metrics,
        *,
        kinds: Iterable[AnnouncementKind],
        target: str | None = None,
        drafter: str | None = None,
        must_be_named: bool = False,
    ) -> None:
        """
        Args:
            target: tell only what is about this target; None tells what is about any. `drafter` likewise.
            must_be_named: pass over messages that name no pair; for a follower of one pair among several, to which a
                bare version number says nothing.
        """
        self._reader = reader
        self._metrics = metrics
        self._kinds = frozenset(kinds)
        self._target, self._drafter = target, drafter
        self._must_be_named = must_be_named
        self._next: dict[int, int] = {}
        self._untold: dict[object, Announcement] = {}
        self._elsewhere: list[Message] = []
        """Messages of other partitions, until the first one's are all there."""
        self._offsets: list[int] = []
        self._newest_ms: list[int] = []
        """Greatest timestamp up to each of these offsets of the first partition."""
        self._added = self._highest = 0  # to sequences; of all so far
        reader.seek({})

    def poll(self, timeout_s: float) -> tuple[Announcement, ...]:
        """What holds and was not told yet, in the order of sequences; empty when the timeout passes without any.

        What is superseded is skipped: after a long absence only the last champion is told.

        Raises:
            BusError: the log cannot be read; polling again may succeed, and nothing is lost.
        """
        try:
            return self._poll(timeout_s)
        except OffsetOutOfRange as exc:
            logger.warning("reading the control log from its first message again: %s", exc)
            self._reader.seek({})
            self._next, self._added = {}, self._highest + 1
            self._elsewhere, self._offsets, self._newest_ms = [], [], []
            return self._poll(timeout_s)

    def _poll(self, timeout_s: float) -> tuple[Announcement, ...]:
        ends = self._reader.end_offsets()
        while True:
            polled = self._reader.poll(MAX_MESSAGES, timeout_s)
            self._next |= polled.next_offsets
            self._elsewhere += [message for message in polled.messages if message.partition != PARTITION]
            self._take([message for message in polled.messages if message.partition == PARTITION])
            has_caught_up = all(self._next.get(partition, 0) >= end for partition, end in ends.items())
            if not polled.next_offsets or has_caught_up:
                self._take(sorted(self._elsewhere, key=lambda message: message.timestamp_ms))
                told, self._untold, self._elsewhere = self._untold, {}, []
                return tuple(sorted(told.values(), key=lambda each: each.sequence))

    def _take(self, messages: Sequence[Message]) -> None:
        for message in messages:
            sequence = self._sequence(message) + self._added
            told = self._readable(message)
            if told is None or not self._is_ours(told):
                continue
            self._highest = max(self._highest, sequence)
            known = self._untold.get(subject(told))
            if known is None or known.sequence <= sequence:
                self._untold[subject(told)] = replace(told, sequence=sequence)

    def _sequence(self, message: Message) -> int:
        """The offset in the first partition, or the last one there that is not younger."""
        if message.partition == PARTITION:
            self._offsets.append(message.offset)
            self._newest_ms.append(max([message.timestamp_ms, *self._newest_ms[-1:]]))
            return message.offset
        older = bisect_right(self._newest_ms, message.timestamp_ms)
        return self._offsets[older - 1] if older else 0

    def _is_ours(self, told: Announcement) -> bool:
        if self._must_be_named and (told.target is None or told.drafter is None):
            return False
        is_about_us = _may_be(told.target, self._target) and _may_be(told.drafter, self._drafter)
        return is_about_us and told.kind in self._kinds

    def _readable(self, message: Message) -> Announcement | None:
        try:
            return parse_announcement(message)
        except WireError as exc:
            logger.warning("skipped %s", exc)
            self._metrics.add("omnidraft_control_messages_skipped_total")
            return None


def _may_be(named: str | None, ours: str | None) -> bool:
    return named is None or ours is None or named == ours
