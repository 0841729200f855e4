"""The control log: announcements between the fleet's processes, JSON messages on one topic per fleet.

{"kind": "champion", "version": 7}                  every worker serves this snapshot; ends any canary
{"kind": "canary", "version": 8, "share": 0.1}      serve it to this share of the requests, the champion to the others
{"kind": "pause"} / {"kind": "resume"}              stop or resume learning
{"kind": "restart", "start": "latest", "restart_id": "..."}  learn from earliest, latest or offsets; each is done once
{"kind": "rewind", "version": 7, "restart_id": "..."}  go back to this champion's weights: what came after was refused
{"kind": "drift", "tenant": "t"}                    agreement on this tenant's traffic fell: draft less, learn faster
{"kind": "drift_over", "tenant": "t"}               it recovered, or is what is normal now
{"kind": "best", "version": 5, "tenant": "t"}       from the distiller: this snapshot agrees best with that traffic
{"kind": "forget", "tenant": "t", "forget_id": "...", "until_ms": 1764000000000}  keep nothing of the tenant from before
Each may name the pair it is about ("target", "drafter"), else it is about all, and may give operators a "reason".
Its offset is its sequence number; the highest holds. All are written to the first partition, however many there are.
"""

import json
import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omnidraft.errors import OffsetOutOfRange, WireError
from omnidraft.ports import (
    Announcement,
    AnnouncementFields,
    AnnouncementKind,
    LogReader,
    LogWriter,
    Message,
    Metrics,
    Outgoing,
)

KEY = b"control"
PARTITION = 0

Subject = Literal["snapshot", "learning", "restart", "rewind", "traffic", "best", "forget"]
_SUBJECTS: dict[AnnouncementKind, Subject] = {
    "champion": "snapshot",
    "canary": "snapshot",
    "pause": "learning",
    "resume": "learning",
    "restart": "restart",
    "rewind": "rewind",
    "drift": "traffic",
    "drift_over": "traffic",
    "best": "best",
    "forget": "forget",
}
MAX_MESSAGES = 1000

logger = logging.getLogger(__name__)


def subject(announcement: Announcement) -> tuple[Subject, str | None]:
    """Return its subject and tenant; a later announcement with the same ones supersedes it."""
    return _SUBJECTS[announcement.kind], announcement.tenant


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True)  # unknown keys are allowed: a later controller may say more

    kind: AnnouncementKind
    version: int | None = None
    share: float | None = Field(None, gt=0, le=1)
    tenant: str | None = None
    reason: str | None = None
    start: str | None = Field(None, pattern=r"^(earliest|latest|\d{1,9}:\d{1,18}( \d{1,9}:\d{1,18})*)$")
    restart_id: str | None = Field(None, min_length=1, max_length=64)
    forget_id: str | None = Field(None, min_length=1, max_length=64)
    until_ms: int | None = Field(None, ge=0)
    fence: str | None = None
    target: str | None = None
    drafter: str | None = None

    @model_validator(mode="after")
    def _has_the_fields_of_its_kind(self) -> "_Wire":
        if (self.kind in ("champion", "canary", "best", "rewind")) != (self.version is not None):
            raise ValueError("champion, canary, best and rewind have a version, nothing else has")
        if (self.kind == "canary") != (self.share is not None):
            raise ValueError("a canary has a share, nothing else has")
        if (self.kind in ("drift", "drift_over", "best", "forget")) != (self.tenant is not None):
            raise ValueError("what is about traffic has a tenant, nothing else has")
        if (self.kind == "restart") != (self.start is not None):
            raise ValueError("a restart has a start, nothing else has")
        if (self.kind in ("restart", "rewind")) != (self.restart_id is not None):
            raise ValueError("restart and rewind have a name, nothing else has")
        if {self.kind == "forget"} != {self.forget_id is not None, self.until_ms is not None}:
            raise ValueError("an order to forget has a name and a time, nothing else has")
        return self


class _AllFields(AnnouncementFields, total=False):
    target: str | None
    drafter: str | None
    start: str
    forget_id: str
    until_ms: int


def publish_announcement(
    writer: LogWriter, kind: AnnouncementKind, version: int | None = None, **fields: Unpack[_AllFields]
) -> None:
    """Publish an announcement to every process. Repeating one does no harm.

    Raises:
        BusError: the log cannot be written.
        ValueError: this kind needs another field, or has none of these.
    """
    wire = _Wire(kind=kind, version=version, **fields)
    writer.append([Outgoing(KEY, json.dumps(wire.model_dump(exclude_none=True)).encode(), partition=PARTITION)])


@dataclass(frozen=True, slots=True)
class LogAnnouncer:
    """Implements ports.Announcer on the control log."""

    writer: LogWriter
    target: str
    drafter: str

    def publish(self, kind: AnnouncementKind, version: int | None = None, **fields: Unpack[AnnouncementFields]) -> None:
        """See ports.Announcer."""
        publish_announcement(self.writer, kind, version, target=self.target, drafter=self.drafter, **fields)


def parse_announcement(message: Message) -> Announcement:
    """Decode an announcement. Raises WireError when the message is not one."""
    if message.damage is not None:
        raise WireError(f"control message {message.partition}:{message.offset}: {message.damage.error}")
    try:
        wire = _Wire.model_validate_json(message.value)
    except ValidationError as exc:
        raise WireError(f"control message {message.offset}: {exc.errors()[0]['msg']}") from exc
    return Announcement(message.offset, **wire.model_dump())


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
    ) -> None:
        """
        Args:
            target: return only announcements about this target; None returns those about any. `drafter` likewise.
            must_be_named: skip messages that name no pair; for a follower of one pair among several, to which a bare
                version number is ambiguous.
        """
        self._reader = reader
        self._metrics = metrics
        self._kinds = frozenset(kinds)
        self._target, self._drafter = target, drafter
        self._must_be_named = must_be_named
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
        reader.seek({})

    def poll(self, timeout_s: float) -> tuple[Announcement, ...]:
        """See ports.ControlFollower. The announcements come in the order of their sequences.

        Superseded ones are skipped: after a long absence only the last champion is returned.
        """
        try:
            return self._poll(timeout_s)
        except OffsetOutOfRange as exc:
            logger.warning("reading the control log from its first message again: %s", exc)
            self._reader.seek({})
            self._next, self._sequence_base = {}, self._highest + 1
            self._other_partitions, self._offsets, self._newest_ms = [], [], []
            return self._poll(timeout_s)

    def _poll(self, timeout_s: float) -> tuple[Announcement, ...]:
        ends = self._reader.end_offsets()
        while True:
            polled = self._reader.poll(MAX_MESSAGES, timeout_s)
            self._next |= polled.next_offsets
            self._other_partitions += [message for message in polled.messages if message.partition != PARTITION]
            self._process([message for message in polled.messages if message.partition == PARTITION])
            has_caught_up = all(self._next.get(partition, 0) >= end for partition, end in ends.items())
            if not polled.next_offsets or has_caught_up:
                self._process(sorted(self._other_partitions, key=lambda message: message.timestamp_ms))
                pending, self._pending, self._other_partitions = self._pending, {}, []
                return tuple(sorted(pending.values(), key=lambda each: each.sequence))

    def _process(self, messages: Sequence[Message]) -> None:
        for message in messages:
            sequence = self._sequence(message) + self._sequence_base
            announcement = self._parse(message)
            if announcement is None or not self._concerns_us(announcement):
                continue
            self._highest = max(self._highest, sequence)
            previous = self._pending.get(subject(announcement))
            if previous is None or previous.sequence <= sequence:
                self._pending[subject(announcement)] = replace(announcement, sequence=sequence)

    def _sequence(self, message: Message) -> int:
        """Return the offset in the first partition, or that of the last message there that is not newer."""
        if message.partition == PARTITION:
            self._offsets.append(message.offset)
            self._newest_ms.append(max([message.timestamp_ms, *self._newest_ms[-1:]]))
            return message.offset
        older = bisect_right(self._newest_ms, message.timestamp_ms)
        return self._offsets[older - 1] if older else 0

    def _concerns_us(self, announcement: Announcement) -> bool:
        is_for_all = announcement.kind == "forget"
        if self._must_be_named and not is_for_all and (announcement.target is None or announcement.drafter is None):
            return False
        is_about_us = _matches(announcement.target, self._target) and _matches(announcement.drafter, self._drafter)
        return is_about_us and announcement.kind in self._kinds

    def _parse(self, message: Message) -> Announcement | None:
        try:
            return parse_announcement(message)
        except WireError as exc:
            logger.warning("skipped %s", exc)
            self._metrics.add("omnidraft_control_messages_skipped_total")
            return None


def _matches(named: str | None, ours: str | None) -> bool:
    return named is None or ours is None or named == ours
