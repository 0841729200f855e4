"""Trace records from a log, with every message that cannot be learned from put aside, damage too.

Order of effects in a poll: read; dead-letter what is unreadable, or of our pair in other vocabularies; wait for the
acknowledgement; return. So an offset never moves past a message that is neither returned nor kept. After a crash a
dead letter may be written twice; its origin headers name it.
The topic is shared: a record of another pair is nothing broken. It is passed over and counted.
A poll's size says nothing: each record carries its partition and offset, and within a partition they come in order,
so batches that are cut by these do not depend on how polls fell.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from omnidraft.errors import UnknownKey, UnknownSchema, VocabularyError, WireError
from omnidraft.ports import Damage, DamageReason, LogReader, LogWriter, Message, Metrics, Offsets, Outgoing, PollResult
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord

logger = logging.getLogger(__name__)

READ = "omnidraft_traces_read_total"
SKIPPED = "omnidraft_traces_skipped_total"

OTHER_PAIR = "other_pair"
"""Reason of a sound record that another distiller learns from."""
POISON = "poison"
"""Reason of a sound record over which the learner's process died again and again."""
DEAD_LETTER_REASONS = ("unknown_schema", "unknown_key", "other_alignment", "unreadable")
"""Of messages that a poll refuses."""
DAMAGE_REASONS: tuple[str, ...] = get_args(DamageReason)
"""Of what the log could not give whole."""
MAX_VALUE_BYTES = 950_000
"""Of a dead letter: a longer message is cut, so that it fits into any log with its headers."""
MAX_HEADERS = 16
MAX_HEADER_BYTES = 512

RecordAt = tuple[int, int, TraceRecord]
"""(partition, offset, record)."""
Skipped = tuple[int, int, str, int]
"""(partition, offset of the last one, reason, number of messages)."""


@dataclass(frozen=True, slots=True)
class PolledRecords:
    """What a poll of the source gave."""

    records: tuple[RecordAt, ...]
    """In offset order within each partition."""
    next_offsets: Offsets
    """Where to read on, for every partition that moved; past dead letters too."""
    skipped: tuple[Skipped, ...] = ()
    """Every dead letter and every record of another pair, in the same order."""


class TraceConsumer:
    """Reads one trace topic. One thread at a time."""

    def __init__(
        self,
        reader: LogReader,
        dead_letters: LogWriter,
        expected_alignment: str | None,
        metrics: Metrics,
        *,
        topic: str,
        target: str | None = None,
        drafter: str | None = None,
    ) -> None:
        """
        Args:
            expected_alignment: the fingerprint that records must have; None takes any.
            topic: the reader's name, for the dead letters.
            target: records of other targets are passed over; None takes any. `drafter` likewise.
        """
        self._reader, self._dead_letters, self._metrics = reader, dead_letters, metrics
        self._target, self._drafter = target, drafter
        self._expected_alignment, self._topic = expected_alignment, topic
        self._unsettled: PollResult | None = None

    def seek(self, offsets: Offsets) -> None:
        """Read on from here; partitions that are not named start at their first message.

        Raises:
            OffsetOutOfRange: an offset lies outside the log.
        """
        self._reader.seek(offsets)
        self._unsettled = None

    def seek_back(self, num_messages: int) -> None:
        """Read on from so many messages before the end of every partition, or the first there is. Raises BusError."""
        self._reader.seek_back(num_messages)
        self._unsettled = None

    def first_offsets(self) -> Offsets:
        """Of the oldest message of every partition that is still there. Raises BusError."""
        return self._reader.first_offsets()

    def identity(self) -> str:
        """Names the topic for as long as it exists. Raises BusError."""
        return self._reader.identity()

    def end_offsets(self) -> Offsets:
        """One past the last message of every partition. Raises BusError."""
        return self._reader.end_offsets()

    def poll(self, max_records: int, timeout_s: float) -> PolledRecords:
        """Up to `max_records` messages; fewer, or none, when the timeout passes first.

        Raises:
            BusError: the log cannot be read, or a dead letter not be written; polling again loses nothing.
        """
        polled = self._unsettled or self._reader.poll(max_records, timeout_s)
        self._unsettled = polled  # until its dead letters are acknowledged
        records, letters, skipped = self._sorted(polled)
        if letters:
            self._dead_letters.append(letters)
        self._unsettled = None
        self._count(len(records), skipped)
        _log_damage(self._topic, polled.messages)
        return PolledRecords(tuple(records), polled.next_offsets, tuple(skipped))

    def dead_letter(self, poison: Sequence[RecordAt]) -> None:
        """Dead-letter these records, as (partition, offset, record); returns when that is acknowledged.

        Raises:
            BusError: the letters cannot be written; some of them may be.
        """
        letters = []
        for partition, offset, record in poison:
            value, headers = codec.encode(record), codec.headers(record)
            message = Message(partition, offset, codec.key(record), value, headers, record.time_ms)
            letters.append(self._dead_letter(message, POISON, "the learner's process died over it again and again"))
        self._dead_letters.append(letters)
        self._metrics.add(SKIPPED, len(letters), reason=POISON)

    def _sorted(self, polled: PollResult) -> tuple[list[RecordAt], list[Outgoing], list[Skipped]]:
        records, letters, skipped = list[RecordAt](), list[Outgoing](), list[Skipped]()
        for message in polled.messages:
            if (damage := message.damage) is not None:
                skipped.append((message.partition, message.next_offset - 1, damage.reason, damage.num_messages))
                letters.append(self._dead_letter(message, damage.reason, damage.error))
                continue
            try:
                record = self._accepted(message)
            except (WireError, VocabularyError) as exc:
                reason = _reason(exc)
                skipped.append((message.partition, message.offset, reason, 1))
                letters.append(self._dead_letter(message, reason, str(exc)))
                continue
            if record is None:
                skipped.append((message.partition, message.offset, OTHER_PAIR, 1))
            else:
                records.append((message.partition, message.offset, record))
        return records, letters, skipped

    def _accepted(self, message: Message) -> TraceRecord | None:
        """None: of another pair. Where the header says so the payload is not read: its schema is no concern of ours."""
        if not _is(message.headers.get("target", b"").decode(errors="replace") or None, self._target):
            return None
        record = codec.decode(message.value, message.headers)
        if not (_is(record.target, self._target) and _is(record.drafter, self._drafter)):
            return None
        if self._expected_alignment not in (None, record.alignment):
            raise VocabularyError(f"alignment: {record.alignment}, this learner's is {self._expected_alignment}")
        return record

    def _dead_letter(self, message: Message, reason: str, error: str) -> Outgoing:
        """The message as it was, with what was wrong and where it stood."""
        headers = {
            "reason": reason.encode(),
            "error": error.encode()[:MAX_HEADER_BYTES],
            "origin_topic": self._topic.encode(),
            "origin_partition": str(message.partition).encode(),
            "origin_offset": str(message.offset).encode(),
        }
        original = message.headers
        if message.damage is not None:
            original = message.damage.headers
            headers |= _of_damage(message.damage)
        if len(message.value) > MAX_VALUE_BYTES:
            headers["cut_from_bytes"] = str(len(message.value)).encode()
        for name in list(original)[:MAX_HEADERS]:
            headers[f"original.{name[:MAX_HEADER_BYTES]}"] = original[name][:MAX_HEADER_BYTES]
        return Outgoing(message.key[:MAX_HEADER_BYTES], message.value[:MAX_VALUE_BYTES], headers)

    def _count(self, num_records: int, skipped: Sequence[Skipped]) -> None:
        self._metrics.add(READ, num_records)
        counts = Counter[str]()
        for _, _, reason, number in skipped:
            counts[reason] += number
        for reason, number in counts.items():
            self._metrics.add(SKIPPED, number, reason=reason)


def _log_damage(topic: str, messages: Sequence[Message]) -> None:
    """One line for a poll, however much there is."""
    damaged = [message for message in messages if message.damage is not None]
    if damaged and (damage := damaged[0].damage):
        where = f"{topic}[{damaged[0].partition}] offset {damaged[0].offset}"
        logger.warning(
            "%d dead letters of damage, first at %s: %s: %s", len(damaged), where, damage.reason, damage.error
        )


def _of_damage(damage: Damage) -> dict[str, bytes]:
    """Headers of its letter."""
    told = {"origin_num_messages": str(damage.num_messages).encode()}
    return told | ({"raw": b"1"} if damage.is_raw else {})


def _is(named: str | None, ours: str | None) -> bool:
    return named is None or ours is None or named == ours


def _reason(exc: WireError | VocabularyError) -> str:
    match exc:
        case UnknownSchema():
            return "unknown_schema"
        case UnknownKey():
            return "unknown_key"
        case VocabularyError():
            return "other_alignment"
        case _:
            return "unreadable"
