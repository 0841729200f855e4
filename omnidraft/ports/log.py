"""The log: a topic of messages in partitions, written and read by several processes, and the reasons why a trace record
was not written to it or not learned from, or dropped from the fleet's memory.

The values of the reasons are stored: in the metric label `reason`, in manifests and in the header `reason` of dead
letters.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

Offsets = Mapping[int, int]
"""Partition -> offset of the next message to read."""
COMPACTION_LAG_S = 3600.0
"""How long a compacted topic keeps a message that a newer one of its key replaced: readers that run see both."""

DropReason = Literal["queue_full", "closed", "invalid", "too_large", "redacted", "redactor_failed"]
"""The worker did not write the record."""
RejectReason = Literal["unknown_schema", "unknown_key", "other_alignment", "unreadable"]
"""The distiller read a whole message and cannot learn from it."""
DamageReason = Literal["malformed_batch", "corrupt_batch", "missing"]
"""A client wrote it malformed (the first), or the log's storage corrupted or lost it."""
POISON = "poison"
"""The record is sound, but the learner's process died over it again and again."""
OTHER_PAIR = "other_pair"
"""The record is sound, and another distiller learns from it."""
PASSED_OVER = "passed_over"
"""The learner lagged, and went on at newer messages."""
OVER_SHARE = "over_share"
"""The record is sound, and its tenant had its share of the step."""
EXPIRED = "expired"
"""The log deleted the message before it was read."""

FORGOTTEN = "forgotten"
"""The record's tenant was forgotten: its key is destroyed, its content deleted, or it is older than that order."""

MemoryDropReason = Literal["expired", "forgotten", "full", "unknown_ids"]
"""Older than the log's retention; of a forgotten tenant; the oldest beyond a limit; with ids that the target lacks."""
UnreadableReason = Literal["forgotten", "unknown_key", "damaged"]
"""The key of a memory's file is destroyed, or is not known here; or the content is not that of a memory."""

DROP_REASONS: tuple[str, ...] = get_args(DropReason)
REJECT_REASONS: tuple[str, ...] = get_args(RejectReason)
DEAD_LETTER_REASONS = (*REJECT_REASONS, *get_args(DamageReason), POISON)
SKIP_REASONS = (*DEAD_LETTER_REASONS, OTHER_PAIR, PASSED_OVER, OVER_SHARE, EXPIRED, FORGOTTEN)
MEMORY_DROP_REASONS: tuple[str, ...] = get_args(MemoryDropReason)
UNREADABLE_REASONS: tuple[str, ...] = get_args(UnreadableReason)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for a log."""

    key: bytes
    value: bytes
    headers: Mapping[str, bytes] = field(default_factory=dict)
    partition: int | None = None
    """None: chosen by the key."""
    tenant: str | None = None
    """Whose data it is, for encryption; it is not written. None: nobody's, or that of the original that it copies."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a log cannot return the messages at some of its offsets."""

    reason: DamageReason
    error: str
    num_messages: int = 1
    """The number of offsets that are lost together, beginning with the message's own."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a log, or the remains of damaged ones."""

    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: Mapping[str, bytes]
    """Empty when it is damaged, so that it cannot pass for an intact message."""
    timestamp_ms: int
    damage: Damage | None = None

    @property
    def next_offset(self) -> int:
        return self.offset + (1 if self.damage is None else self.damage.num_messages)


@dataclass(frozen=True, slots=True)
class PollResult:
    """Messages in offset order within each partition, and the next offsets. Every offset in between has a message,
    except those the log uses itself (Kafka's transaction markers)."""

    messages: tuple[Message, ...]
    next_offsets: Offsets
    """The next offset of every partition that advanced in this poll."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """The configuration of a topic, read without changing anything."""

    num_partitions: int
    max_message_bytes: int | None = None
    """None: no limit."""
    retention_ms: int | None = None
    """None: kept for ever."""
    stamped_by: Literal["writer", "log"] = "writer"
    """The clock of message timestamps."""


class LogWriter(Protocol):
    """The producer of one topic. One thread at a time."""

    def append(self, messages: Sequence[Outgoing]) -> None:
        """Append the messages, in order per key; return when all are acknowledged.

        Raises:
            BusError: refused or timed out; some of the messages may be in the log, and the caller may append again.
            MessageTooLarge: the topic never takes one of the messages; others may be in the log.
        """

    def close(self) -> None: ...


class LogReader(Protocol):
    """The consumer of one topic: all its partitions, at offsets that the caller keeps. One thread at a time.

    No content of a topic stops it: a message that cannot be returned intact has `damage`.
    """

    def partitions(self) -> tuple[int, ...]:
        """Return the partitions that are read. One that is added to the topic later is read from its first message on,
        and is included here."""

    def seek(self, offsets: Offsets) -> None:
        """Continue reading at these offsets; partitions that are not named start at their first message.

        Raises:
            OffsetOutOfRange: an offset lies outside the log (retention passed it).
        """

    def seek_back(self, num_messages: int) -> None:
        """Continue reading `num_messages` before the end of every partition, or at its oldest message."""

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        """Return up to `max_messages`; fewer, or none, when the timeout passes first. A poll may return fewer messages
        than the log holds.

        Raises:
            BusError: the log cannot be read; polling again may succeed.
            OffsetOutOfRange: the next offset is gone; polling again raises it again, until the caller seeks.
            LogTruncated: messages that were read are gone, and others may have their offsets. It is raised once.
        """

    def first_offsets(self) -> Offsets:
        """Return the offset of the oldest message of every partition; the end offset of an empty one."""

    def identity(self) -> str:
        """Return an id of this topic; a topic created anew under the same name has another one."""

    def end_offsets(self) -> Offsets:
        """Return the offset after the last message of every partition: lag is this minus the next offset."""

    def close(self) -> None: ...


class RecordCipher(Protocol):
    """Encrypts records outside the log, each with its tenant's key; without a key store all have the master key."""

    def encrypt(self, tenant: str, plain: bytes) -> tuple[str, bytes]:
        """Return the id of the tenant's key and the record encrypted with it. Raises KeyStoreError."""

    def forgotten_ms(self, tenants: Collection[str]) -> dict[str, int]:
        """Return when a key of these tenants was destroyed last, Unix milliseconds; those of whom none was are missing.
        What was encrypted before this call, with a key of then or a new one, is theirs only if it is newer. Raises
        KeyStoreError."""

    def decrypt(self, key_id: str, token: bytes) -> bytes:
        """Return the record.

        Raises:
            RecordForgotten: the key was destroyed.
            UnknownKey: the key is not known, or does not open it.
            KeyStoreError: the key store does not answer; trying again may succeed.
        """

    def clear_cache(self) -> None:
        """Look every key up again, since one was destroyed: `encrypt` uses none that was destroyed before this call."""
