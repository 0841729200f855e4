"""Trace records from a log; messages that cannot be learned from become dead letters, damaged ones too.

Order of effects in a poll: read; dead-letter messages that are unreadable, or of our pair in other vocabularies; wait
for the acknowledgement; return. So an offset never moves past a message that is neither returned nor dead-lettered.
After a crash a dead letter may be written twice; its origin headers identify it.
The topic is shared: a record of another pair is skipped and counted, and no dead letter.
The size of a poll means nothing: each record carries its partition and offset, and within a partition they come in
order, so batches that are cut by these do not depend on the sizes of polls.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from omnidraft.errors import MessageTooLarge, RecordForgotten, UnknownKey, UnknownSchema, VocabularyError, WireError
from omnidraft.ports import (
    FORGOTTEN,
    OTHER_PAIR,
    POISON,
    LogReader,
    LogWriter,
    Message,
    Metrics,
    Offsets,
    Outgoing,
    PollResult,
    RejectReason,
)
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from omnidraft.traces.schema import KEY_ID

logger = logging.getLogger(__name__)

READ = "omnidraft_traces_read_total"
SKIPPED = "omnidraft_traces_skipped_total"

MAX_VALUE_BYTES = 950_000
"""Maximal size of a dead letter: a longer message is cut, so that it fits into a log with its headers. Where a topic
takes less, it is cut in half until it fits."""
MAX_HEADERS = 16
MAX_HEADER_BYTES = 512

PartitionOffset = tuple[int, int]
"""(partition, offset)."""
RecordAt = tuple[int, int, TraceRecord]
"""(partition, offset, record)."""
Skipped = tuple[int, int, str, int]
"""(partition, offset of the last one, reason, number of messages)."""


@dataclass(frozen=True, slots=True)
class PolledRecords:
    """The result of a poll."""

    records: tuple[RecordAt, ...]
    """Readable records of our pair, in offset order within each partition."""
    next_offsets: Offsets
    """The next offset of every partition that moved; past dead letters too."""
    skipped: tuple[Skipped, ...] = ()
    """Every dead letter, and every record of another pair, in the same order."""


class TraceConsumer:
    """The consumer of one trace topic. Not thread-safe."""

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
        is_forgotten: Callable[[TraceRecord], bool] = lambda record: False,
    ) -> None:
        """
        Args:
            expected_alignment: the fingerprint that records must have; None takes any.
            topic: the name of the reader's topic, for the dead letters.
            target: records of other targets are skipped; None takes any. `drafter` likewise.
            is_forgotten: whether a record's tenant was forgotten since; such records are skipped.
        """
        self._reader, self._dead_letters, self._metrics = reader, dead_letters, metrics
        self._target, self._drafter = target, drafter
        self._expected_alignment, self._topic = expected_alignment, topic
        self._is_forgotten = is_forgotten
        self._unsettled: PollResult | None = None

    def seek(self, offsets: Offsets) -> None:
        """Read on from these offsets; partitions that are not named start at their first message.

        Raises:
            OffsetOutOfRange: an offset lies outside the log.
        """
        self._reader.seek(offsets)
        self._unsettled = None

    def seek_back(self, num_messages: int) -> None:
        """Read on from so many messages before the end of every partition, or its first message. Raises BusError."""
        self._reader.seek_back(num_messages)
        self._unsettled = None

    def first_offsets(self) -> Offsets:
        """Return the offset of the oldest message of every partition that is still there. Raises BusError."""
        return self._reader.first_offsets()

    def identity(self) -> str:
        """Return an id of the topic, the same for as long as it exists. Raises BusError."""
        return self._reader.identity()

    def end_offsets(self) -> Offsets:
        """Return one past the last offset of every partition. Raises BusError."""
        return self._reader.end_offsets()

    def poll(self, max_records: int, timeout_s: float) -> PolledRecords:
        """Return up to `max_records` messages; fewer, or none, when the timeout passes first.

        Raises:
            BusError: the log cannot be read, or a dead letter not be written; polling again loses nothing.
        """
        polled = self._unsettled or self._reader.poll(max_records, timeout_s)
        self._unsettled = polled  # until its dead letters are acknowledged
        records, outgoing, skipped = self._sorted(polled)
        if outgoing:
            self._append(outgoing)
        self._unsettled = None
        self._count(len(records), skipped)
        _log_damage(self._topic, polled.messages)
        return PolledRecords(tuple(records), polled.next_offsets, tuple(skipped))

    def dead_letter(self, poison: Sequence[RecordAt]) -> None:
        """Dead-letter these records, and return when that is acknowledged.

        Raises:
            BusError: the dead letters cannot be written; some of them may be.
        """
        outgoing = []
        for partition, offset, record in poison:
            value, headers = codec.encode(record, max_bytes=None), codec.headers(record)
            message = Message(partition, offset, codec.key(record), value, headers, record.time_ms)
            letter = self._dead_letter(message, POISON, "the learner's process died over it again and again")
            outgoing.append(replace(letter, tenant=record.tenant))
        self._append(outgoing)
        self._metrics.add(SKIPPED, len(outgoing), reason=POISON)

    def _append(self, letters: Sequence[Outgoing]) -> None:
        try:
            self._dead_letters.append(letters)
        except MessageTooLarge:
            if len(letters) == 1 and not letters[0].value:
                raise
            for each in letters if len(letters) > 1 else (_halved(letters[0]),):
                self._append([each])

    def _sorted(self, polled: PollResult) -> tuple[list[RecordAt], list[Outgoing], list[Skipped]]:
        records, outgoing, skipped = list[RecordAt](), list[Outgoing](), list[Skipped]()
        for message in polled.messages:
            if (damage := message.damage) is not None:
                skipped.append((message.partition, message.next_offset - 1, damage.reason, damage.num_messages))
                outgoing.append(self._dead_letter(message, damage.reason, damage.error))
                continue
            try:
                record = self._accepted(message)
            except RecordForgotten:
                skipped.append((message.partition, message.offset, FORGOTTEN, 1))
                continue
            except (WireError, VocabularyError) as exc:
                reason = _reason(exc)
                skipped.append((message.partition, message.offset, reason, 1))
                outgoing.append(self._dead_letter(message, reason, str(exc)))
                continue
            if record is None:
                skipped.append((message.partition, message.offset, OTHER_PAIR, 1))
            else:
                records.append((message.partition, message.offset, record))
        return records, outgoing, skipped

    def _accepted(self, message: Message) -> TraceRecord | None:
        """Return the record; None for one of another pair, whose payload is not read where the header says so."""
        if not _is(message.headers.get("target", b"").decode(errors="replace") or None, self._target):
            return None
        record = codec.decode(message.value, message.headers)
        if not (_is(record.target, self._target) and _is(record.drafter, self._drafter)):
            return None
        if self._expected_alignment not in (None, record.alignment):
            raise VocabularyError(f"alignment: {record.alignment}, this learner's is {self._expected_alignment}")
        if self._is_forgotten(record):
            raise RecordForgotten(f"payload: of a tenant who was forgotten after {record.time_ms}")
        return record

    def _dead_letter(self, message: Message, reason: str, error: str) -> Outgoing:
        """Return the message as it was, with headers for the reason, the error and its position."""
        headers = {
            "reason": reason.encode(),
            "error": error.encode()[:MAX_HEADER_BYTES],
            "origin_topic": self._topic.encode(),
            "origin_partition": str(message.partition).encode(),
            "origin_offset": str(message.offset).encode(),
        }
        original = message.headers
        if message.damage is not None:
            headers |= {"origin_num_messages": str(message.damage.num_messages).encode()}
        elif KEY_ID in original:
            headers[KEY_ID] = original[KEY_ID]  # the dead letter is encrypted with the same key
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


def _halved(letter: Outgoing) -> Outgoing:
    size = len(letter.value)
    headers = {"cut_from_bytes": str(size).encode(), **letter.headers}  # unless it was cut before
    return replace(letter, value=letter.value[: size // 2], headers=headers)


def _log_damage(topic: str, messages: Sequence[Message]) -> None:
    """Log one line for a poll, however many messages are damaged."""
    damaged = [message for message in messages if message.damage is not None]
    if damaged and (damage := damaged[0].damage):
        where = f"{topic}[{damaged[0].partition}] offset {damaged[0].offset}"
        logger.warning(
            "%d dead letters of damage, first at %s: %s: %s", len(damaged), where, damage.reason, damage.error
        )


def _is(named: str | None, ours: str | None) -> bool:
    return named is None or ours is None or named == ours


def _reason(exc: WireError | VocabularyError) -> RejectReason:
    match exc:
        case UnknownSchema():
            return "unknown_schema"
        case UnknownKey():
            return "unknown_key"
        case VocabularyError():
            return "other_alignment"
        case _:
            return "unreadable"
