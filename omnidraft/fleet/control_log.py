"""The control log: a topic whose newest message of each key holds. Kafka compacts it, SQLite deletes what was replaced.

A message's key is KIND/TARGET/DRAFTER and what narrows it, without the pair for what concerns every pair, each part
quoted as in a URL. Its value is JSON: {"key": ..., "sequence": ..., "at_ms": ..., "reason": ..., "value": {...}}, with
`value` null where it was removed. Sequences grow over all who write: each is the time in milliseconds, or one more than
the newest in the log where clocks differ (a hybrid logical clock, https://cse.buffalo.edu/tech-reports/2014-04.pdf), so
neither the position in the log nor a message written again brings an old value back.
"""

import json
import logging
import time
from collections.abc import Callable
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnidraft.errors import BusError, OffsetOutOfRange, SignatureRefused, WireError
from omnidraft.fleet.control_signing import UNSIGNED_KINDS, ControlSigning
from omnidraft.ports import (
    FLEET_KINDS,
    VALUES,
    ControlState,
    ControlValue,
    Entry,
    Key,
    LogReader,
    LogWriter,
    Message,
    Metrics,
    Offsets,
    Outgoing,
)

PARTITION = 0
MAX_MESSAGES = 1000
READ_S = 2.0
"""The wait for the rest of the log before something is put."""
MAX_SILENCE_S = 20.0
"""Seconds of polls without a message after which the rest of a log counts as unreadable."""

logger = logging.getLogger(__name__)


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True)

    key: str
    sequence: int = Field(ge=0)
    at_ms: int
    reason: str | None = None
    value: dict[str, object] | None


class ControlLog:
    """Implements ports.ControlFollower and ports.ControlWriter for one pair. The log is opened when it is needed.

    Args:
        signing: signs what is put, and refuses what nobody signed who may; None: neither.
        is_keeper: write the newest genuine messages again where others were written over them, which would be all that
            is left of their keys once the topic is compacted, or where the log lost them.
        hears_workers: take in what workers say of themselves, too. Whoever may write that they run may invent as many
            as he likes, so only who shows them to operators does.
    """

    def __init__(
        self,
        open_reader: Callable[[], LogReader],
        open_writer: Callable[[], LogWriter],
        metrics: Metrics,
        *,
        target: str,
        drafter: str,
        signing: ControlSigning | None = None,
        is_keeper: bool = False,
        hears_workers: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._open_reader, self._open_writer, self._metrics = open_reader, open_writer, metrics
        self._pair, self._signing, self._is_keeper, self._clock = (target, drafter), signing, is_keeper, clock
        self._kinds = VALUES.keys() if hears_workers else VALUES.keys() - UNSIGNED_KINDS
        self._reader: LogReader | None = None
        self._writer: LogWriter | None = None
        self._next: dict[int, int] = {}
        self._state, self._entries = ControlState(), dict[Key, Entry]()
        self._changed: dict[Key, Entry] = {}
        self._newest_sequence = 0
        self._genuine: dict[Key, Outgoing] = {}
        """The newest message of each key, for its keeper."""
        self._overwritten: set[Key] = set()
        self._refusals: list[WireError] = []
        self._silent_s = 0.0
        """Seconds that `poll_all` has waited since the last message or error."""

    def put(self, key: Key, value: ControlValue | None, reason: str | None = None) -> None:
        """See ports.ControlWriter. Raises ValueError when this kind of key has values of another kind."""
        kind = VALUES[key[0]]
        if value is not None and type(value) is not kind:
            raise ValueError(f"{key[0]} is a {kind.__name__}, not a {type(value).__name__}")
        if key[0] not in UNSIGNED_KINDS:  # whose keys have one writer each
            self._read(READ_S, at_end_s=0.0)
        now_ms = int(self._clock() * 1000)
        sequence = self._newest_sequence = max(now_ms, self._newest_sequence + 1)
        name = self._name(key)
        wire = {"key": name, "sequence": sequence, "at_ms": now_ms, "reason": reason}
        payload = json.dumps(wire | {"value": value and value.model_dump(mode="json", exclude_unset=True)}).encode()
        headers = {} if self._signing is None else self._signing.headers(key[0], payload)
        self._append([Outgoing(name.encode(), payload, headers, partition=PARTITION)])

    def poll(self, timeout_s: float) -> tuple[ControlState, tuple[Entry, ...]]:
        """See ports.ControlFollower."""
        self._read(timeout_s, at_end_s=0.0 if self._changed else timeout_s)
        return self._take_changes()

    def poll_all(self, timeout_s: float) -> tuple[ControlState, tuple[Entry, ...]]:
        """See ports.ControlFollower. Messages that a log still does not give after MAX_SILENCE_S are left out."""
        before, silent_s, self._silent_s = dict(self._next), self._silent_s, 0.0
        unread = self._read(timeout_s, at_end_s=0.0)
        if self._holds(unread):
            self._silent_s = timeout_s + (silent_s if self._next == before else 0.0)
            silence = f"the control log gave nothing for {self._silent_s:.0f} s before its ends {unread}"
            if self._silent_s < MAX_SILENCE_S:
                raise BusError(silence)
            logger.warning("%s: these messages count as unreadable", silence)
        return self._take_changes()

    def read_whole(self, timeout_s: float = READ_S) -> ControlState:
        """Return what holds, for a process that looks once: `poll_all`, repeated while the log is only silent.

        Raises:
            BusError: the log cannot be read.
        """
        while True:
            try:
                return self.poll_all(timeout_s)[0]
            except BusError:
                if not self._silent_s:
                    raise

    def close(self) -> None:
        """Close the log."""
        for each in (self._reader, self._writer):
            if each is not None:
                each.close()
        self._reader = self._writer = None

    def _holds(self, unread: Offsets) -> bool:
        """Return whether the log holds messages before one of these ends; retention may have deleted them."""
        firsts = self._reader.first_offsets() if unread and self._reader else {}
        return any(firsts.get(partition, 0) < end for partition, end in unread.items())

    def _read(self, timeout_s: float, *, at_end_s: float) -> Offsets:
        """Read up to the end of the log, or until nothing comes within `timeout_s`; return the ends not reached.

        Args:
            at_end_s: seconds to wait for a message where all were read before.
        """
        if self._reader is None:
            self._reader = self._open_reader()
            self._reader.seek(self._next)
        try:
            unread = self._read_on(self._reader, timeout_s, at_end_s)
        except OffsetOutOfRange as exc:
            logger.warning("reading the control log from its first message again: %s", exc)
            self._next, self._overwritten = {}, set(self._genuine)
            self._reader.seek({})
            unread = self._read_on(self._reader, timeout_s, at_end_s)
        self._report_refusals()
        if self._overwritten and not unread:
            self._append([self._genuine[key] for key in self._overwritten])
            self._overwritten = set()
        return unread

    def _read_on(self, reader: LogReader, timeout_s: float, at_end_s: float) -> Offsets:
        ends = reader.end_offsets()
        wait_s = timeout_s if self._unread(ends) else at_end_s
        while True:
            polled = reader.poll(MAX_MESSAGES, wait_s)
            self._next |= polled.next_offsets
            for message in polled.messages:
                self._receive(message)
            unread = self._unread(ends)
            if not polled.next_offsets or not unread:
                return unread

    def _unread(self, ends: Offsets) -> Offsets:
        """Return those of these ends that were not reached yet."""
        return {partition: end for partition, end in ends.items() if self._next.get(partition, 0) < end}

    def _take_changes(self) -> tuple[ControlState, tuple[Entry, ...]]:
        changed, self._changed = self._changed, {}
        if changed:
            self._state = ControlState(dict(self._entries))
        return self._state, tuple(sorted(changed.values(), key=lambda each: each.sequence))

    def _receive(self, message: Message) -> None:
        """Take in a message about our pair, or about all, if it is the newest of its key."""
        if message.damage is not None and message.damage.reason == "missing":
            return  # it was compacted
        key = self._key(message.key)
        if key is None and message.damage is None:
            return
        known = self._entries.get(key or ())
        try:
            entry = self._entry(message, key)
            if self._signing is not None:
                self._signing.check(entry, message.value, message.headers, self._clock())
            self._require_newer(entry, known)
        except WireError as exc:
            self._refusals.append(exc)
            self._overwritten |= {key or ()} & self._genuine.keys()
            return
        key = entry.key
        if self._is_keeper:
            self._genuine[key] = Outgoing(message.key, message.value, message.headers, partition=PARTITION)
            self._overwritten.discard(key)
        if key[0] not in UNSIGNED_KINDS:
            self._newest_sequence = max(self._newest_sequence, entry.sequence)
        if entry != known:  # of two with one sequence the later in the log holds, as it does once that is compacted
            self._entries[key] = self._changed[key] = entry

    def _require_newer(self, entry: Entry, known: Entry | None) -> None:
        """Raise SignatureRefused where a newer entry of its key is known; the same one again does no harm."""
        if known is not None and entry.sequence < known.sequence:
            raise SignatureRefused(f"sequence {entry.sequence} of {entry.kind} came after {known.sequence}")

    def _entry(self, message: Message, key: Key | None) -> Entry:
        """Decode a message. Raises WireError."""
        if message.damage is not None or key is None:
            raise WireError(f"control message {message.offset}: {message.damage and message.damage.error}")
        try:
            wire = _Wire.model_validate_json(message.value)
            value = None if wire.value is None else VALUES[key[0]].model_validate(wire.value)
        except ValidationError as exc:
            raise WireError(f"control message {message.offset}: {exc.errors()[0]['msg']}") from exc
        if wire.key.encode() != message.key:
            raise WireError(f"control message {message.offset} was written under another key than its own")
        return Entry(key, value, wire.sequence, wire.at_ms, wire.reason)

    def _name(self, key: Key) -> str:
        """Return the key of a message."""
        pair = () if key[0] in FLEET_KINDS else self._pair
        return "/".join(quote(part, safe="") for part in (key[0], *pair, *key[1:]))

    def _key(self, name: bytes) -> Key | None:
        """Return the key that a message is about; None: it is of another pair, or of a kind that is not known here."""
        kind, *parts = (unquote(part) for part in name.decode(errors="replace").split("/"))
        if kind not in self._kinds:
            return None
        if kind in FLEET_KINDS:
            return kind, *parts
        return (kind, *parts[2:]) if tuple(parts[:2]) == self._pair else None

    def _append(self, messages: list[Outgoing]) -> None:
        self._writer = self._writer or self._open_writer()
        self._writer.append(messages)

    def _report_refusals(self) -> None:
        """Count and log the messages refused since the last call, in one line however many there are."""
        if self._refusals:
            logger.error("refused %d control message(s), the last one: %s", len(self._refusals), self._refusals[-1])
            self._metrics.add("omnidraft_control_messages_refused_total", len(self._refusals))
            self._refusals = []
