"""The follower of the control log: which announcements hold, in what order, and which are refused."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from omnidraft.errors import BusError, OffsetOutOfRange, SignatureRefused, WireError
from omnidraft.fleet.authentication import Authenticator
from omnidraft.fleet.control_log import FOR_ALL_PAIRS, PARTITION, parse_announcement, subject
from omnidraft.ports import Announcement, AnnouncementKind, LogReader, Message, Metrics, Offsets

MAX_MESSAGES = 1000
MAX_SILENCE_S = 20.0
"""Seconds of polls without a message after which the rest of a log counts as unreadable."""

logger = logging.getLogger(__name__)


class LogControlFollower:
    """Implements ports.ControlFollower: reads the control topic from its first message on.

    A worker follows `champion` and `canary`, the newest of which says what serves; a distiller `pause` and `resume`.
    We write to the first partition only. A message in another partition is ordered by timestamp: after all messages
    that the first partition held by then, before all that came to it later.
    A log that lost its end or was created anew is read from its first message, and its sequences continue after the
    highest one so far, so that no reader takes a new announcement for a stale one.
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
        authenticator: Authenticator | None = None,
        on_genuine: Callable[[Message, Announcement], None] = lambda message, announcement: None,
    ) -> None:
        """
        Args:
            target: return only announcements about this target; None returns those about any. `drafter` likewise.
            must_be_named: skip messages that name no pair; for a follower of one pair among several, to which a bare
                version number is ambiguous.
            authenticator: None takes every announcement for genuine.
            on_genuine: called with each message and its announcement about us, superseded ones included.
        """
        self._reader = reader
        self._metrics = metrics
        self._kinds = frozenset(kinds)
        self._target, self._drafter = target, drafter
        self._must_be_named = must_be_named
        self._authenticator = authenticator
        self._on_genuine = on_genuine
        self._newest: dict[object, int] = {}
        """The highest signed sequence of each subject so far."""
        self._refusals: list[SignatureRefused] = []
        self._next: dict[int, int] = {}
        self._pending: dict[object, Announcement] = {}
        self._other_partitions: list[Message] = []
        """Messages of other partitions, until the first partition has been read to its end."""
        self._offsets: list[int] = []
        self._newest_ms: list[int] = []
        """The greatest timestamp up to each of these offsets of the first partition."""
        self._sequence_base = 0
        """The number added to offsets to give sequences."""
        self._highest = 0
        """The highest sequence so far."""
        self._silent_s = 0.0
        """Seconds that `poll_all` has waited since the last message or error."""
        reader.seek({})

    def poll(self, timeout_s: float) -> tuple[Announcement, ...]:
        """See ports.ControlFollower. The announcements come in the order of their sequences.

        Superseded ones are skipped: after a long absence only the last champion is returned.
        """
        self._read(timeout_s, at_end_s=timeout_s)
        return self._take_pending()

    def poll_all(self, timeout_s: float) -> tuple[Announcement, ...]:
        """See ports.ControlFollower. Messages that a log still does not give after MAX_SILENCE_S are left out."""
        before, silent_s, self._silent_s = dict(self._next), self._silent_s, 0.0
        unread = self._read(timeout_s, at_end_s=0.0)
        if self._holds(unread):
            self._silent_s = timeout_s + (silent_s if self._next == before else 0.0)
            silence = f"the control log gave nothing for {self._silent_s:.0f} s before its ends {unread}"
            if self._silent_s < MAX_SILENCE_S:
                raise BusError(silence)
            logger.warning("%s: these messages count as unreadable", silence)
        return self._take_pending()

    def read_whole(self, timeout_s: float) -> tuple[Announcement, ...]:
        """Do what `poll_all` does, repeated while the log is only silent, for a process that looks once.

        Raises:
            BusError: the log cannot be read.
        """
        while True:
            try:
                return self.poll_all(timeout_s)
            except BusError:
                if not self._silent_s:
                    raise

    def _holds(self, unread: Offsets) -> bool:
        """Return whether the log holds messages before one of these ends; retention may have deleted them."""
        firsts = self._reader.first_offsets() if unread else {}
        return any(firsts.get(partition, 0) < end for partition, end in unread.items())

    def _read(self, timeout_s: float, *, at_end_s: float) -> Offsets:
        """Read up to the end of the log, or until nothing comes within `timeout_s`; return the ends not reached.

        Args:
            at_end_s: seconds to wait for a message where all were read before.
        """
        try:
            return self._read_on(timeout_s, at_end_s)
        except OffsetOutOfRange as exc:
            logger.warning("reading the control log from its first message again: %s", exc)
            self._reader.seek({})
            self._next, self._sequence_base = {}, self._highest + 1
            self._other_partitions, self._offsets, self._newest_ms, self._newest = [], [], [], {}
            return self._read_on(timeout_s, at_end_s)

    def _read_on(self, timeout_s: float, at_end_s: float) -> Offsets:
        ends = self._reader.end_offsets()
        wait_s = timeout_s if self._unread(ends) else at_end_s
        while True:
            polled = self._reader.poll(MAX_MESSAGES, wait_s)
            self._next |= polled.next_offsets
            self._other_partitions += [message for message in polled.messages if message.partition != PARTITION]
            self._process([message for message in polled.messages if message.partition == PARTITION])
            unread = self._unread(ends)
            if not polled.next_offsets or not unread:
                return unread

    def _unread(self, ends: Offsets) -> Offsets:
        """Return those of these ends that were not reached yet."""
        return {partition: end for partition, end in ends.items() if self._next.get(partition, 0) < end}

    def _take_pending(self) -> tuple[Announcement, ...]:
        self._process(sorted(self._other_partitions, key=lambda message: message.timestamp_ms))
        pending, self._pending, self._other_partitions = self._pending, {}, []
        accepted = [each for each in pending.values() if self._accepts(each)]
        self._report_refusals()
        return tuple(sorted(accepted, key=lambda each: each.sequence))

    def _process(self, messages: Sequence[Message]) -> None:
        for message in messages:
            sequence = self._sequence(message) + self._sequence_base
            announcement = self._parse(message)
            if announcement is None or not self._concerns_us(announcement):
                continue
            if self._authenticator is None:
                announcement = replace(announcement, sequence=sequence)
            elif self._is_replayed(announcement):
                continue
            self._on_genuine(message, announcement)
            self._highest = max(self._highest, announcement.sequence)
            previous = self._pending.get(subject(announcement))
            if previous is None or previous.sequence <= announcement.sequence:
                self._pending[subject(announcement)] = announcement

    def _is_replayed(self, announcement: Announcement) -> bool:
        """Return whether the log held a later signed announcement of this subject before it."""
        newest = self._newest.setdefault(subject(announcement), announcement.sequence)
        if announcement.sequence < newest:
            self._refusals.append(SignatureRefused(f"sequence {announcement.sequence} came after {newest}"))
            return True
        self._newest[subject(announcement)] = announcement.sequence
        return False

    def _accepts(self, announcement: Announcement) -> bool:
        if self._authenticator is None:
            return True
        try:
            self._authenticator.accept(announcement)
        except SignatureRefused as exc:
            self._refusals.append(exc)
            return False
        return True

    def _report_refusals(self) -> None:
        """Count and log the messages refused since the last call, in one line however many there are."""
        if not self._refusals:
            return
        logger.error("refused %d control message(s), the last one: %s", len(self._refusals), self._refusals[-1])
        self._metrics.add("omnidraft_control_messages_refused_total", len(self._refusals))
        self._refusals = []

    def _sequence(self, message: Message) -> int:
        """Return the offset in the first partition, or that of the last message there that is not newer."""
        if message.partition == PARTITION:
            self._offsets.append(message.offset)
            self._newest_ms.append(max([message.timestamp_ms, *self._newest_ms[-1:]]))
            return message.offset
        older = bisect_right(self._newest_ms, message.timestamp_ms)
        return self._offsets[older - 1] if older else 0

    def _concerns_us(self, announcement: Announcement) -> bool:
        is_for_all = announcement.kind in FOR_ALL_PAIRS
        if self._must_be_named and not is_for_all and (announcement.target is None or announcement.drafter is None):
            return False
        is_about_us = _matches(announcement.target, self._target) and _matches(announcement.drafter, self._drafter)
        return is_about_us and announcement.kind in self._kinds

    def _parse(self, message: Message) -> Announcement | None:
        try:
            return self._authenticator.authenticate(message) if self._authenticator else parse_announcement(message)
        except SignatureRefused as exc:
            self._refusals.append(exc)
            return None
        except WireError as exc:
            logger.warning("skipped %s", exc)
            self._metrics.add("omnidraft_control_messages_skipped_total")
            return None


def _matches(named: str | None, ours: str | None) -> bool:
    return named is None or ours is None or named == ours
