"""The log: a topic of messages in partitions, written and read by several processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Offsets = Mapping[int, int]
"""Partition -> offset of the next message to read."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for a log."""

    key: bytes
    value: bytes
    headers: Mapping[str, bytes] = field(default_factory=dict)
    partition: int | None = None
    """None: the one that its key belongs to."""


DamageReason = Literal["malformed_record", "malformed_batch", "corrupt_batch", "missing"]
"""A client wrote it so (the first two), or the log's storage spoiled it."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a log cannot give what stands at some of its offsets."""

    reason: DamageReason
    error: str
    num_messages: int = 1
    """Offsets that are lost together, beginning with the message's own."""
    is_raw: bool = True
    """Whether the value is how the bytes lie in the log; else key, value and `headers` are what the client wrote."""
    headers: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a log, or what is left of some."""

    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: Mapping[str, bytes]
    """Empty when it is damaged, so that nobody takes it for a sound one."""
    timestamp_ms: int
    damage: Damage | None = None

    @property
    def next_offset(self) -> int:
        return self.offset + (1 if self.damage is None else self.damage.num_messages)


@dataclass(frozen=True, slots=True)
class PollResult:
    """Messages in offset order within each partition, and where to read on. Every offset that is passed has a message,
    unless the log used it for itself (Kafka's transaction markers)."""

    messages: tuple[Message, ...]
    next_offsets: Offsets
    """For every partition that moved in this poll."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic as its log describes it, asked without changing anything."""

    num_partitions: int
    max_message_bytes: int | None = None
    """None: no limit."""
    retention_ms: int | None = None
    """None: kept for ever."""
    stamped_by: Literal["writer", "log"] = "writer"
    """Whose clock a message's timestamp is."""


class LogWriter(Protocol):
    """The writing end of one topic. One thread at a time."""

    def append(self, messages: Sequence[Outgoing]) -> None:
        """Returns when all are acknowledged, in order per key.

        Raises:
            BusError: refused or timed out; some of the messages may be in the log, and the caller may append again.
        """

    def close(self) -> None: ...


class LogReader(Protocol):
    """The reading end of one topic: all its partitions, at offsets that the caller keeps. One thread at a time.

    No content of a topic stops it: what cannot be given whole is a message with `damage`.
    """

    def partitions(self) -> tuple[int, ...]:
        """Those that are read. One that is added to the topic is read from its first message on, and counted here."""

    def seek(self, offsets: Offsets) -> None:
        """Read on from here; partitions that are not named start at their first message.

        Raises:
            OffsetOutOfRange: an offset lies outside the log (retention passed it).
        """

    def seek_back(self, num_messages: int) -> None:
        """Read on from so many messages before the end of every partition, or from the first that is still there."""

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        """Up to `max_messages`; fewer, or none, when the timeout passes first. A poll may return fewer than there are.

        Raises:
            BusError: the log cannot be read; polling again may succeed.
            OffsetOutOfRange: what comes next is gone; polling again says so again, until somebody seeks.
        """

    def first_offsets(self) -> Offsets:
        """Of the oldest message of every partition that is still there; the end offset where there is none."""

    def identity(self) -> str:
        """Names this topic for as long as it exists; one that is created anew under the same name has another."""

    def end_offsets(self) -> Offsets:
        """One past the last message of every partition: lag is this minus where one reads."""

    def close(self) -> None: ...
