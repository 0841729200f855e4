"""Trace records from a log, with every message that cannot be learned from put aside.

Order of effects in a poll: read; dead-letter what is unreadable or of another vocabulary pair; wait for the
acknowledgement; return. So an offset never moves past a message that is neither returned nor kept. After a crash a
dead letter may be written twice; its origin headers name it.
A poll's size says nothing: each record carries its partition and offset, and within a partition they come in order,
so batches that are cut by these do not depend on how polls fell.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from omnidraft.errors import UnknownSchema, VocabularyError, WireError
from omnidraft.ports import LogReader, LogWriter, Message, Metrics, Offsets, Outgoing, Polled
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord

READ = "omnidraft_traces_read_total"
SKIPPED = "omnidraft_traces_skipped_total"

MAX_VALUE_BYTES = 950_000
"""Of a dead letter: a longer message is cut, so that it fits into any log with its headers."""
MAX_HEADERS = 16
MAX_HEADER_BYTES = 512


@dataclass(frozen=True, slots=True)
class PolledRecords:
    """What a poll of the source gave."""

    records: tuple[tuple[int, int, TraceRecord], ...]
    """(partition, offset, record), in offset order within each partition."""
    next_offsets: Offsets
    """Where to read on, for every partition that moved; past dead letters too."""
    skipped: Mapping[str, int]
    """Reason -> number of dead letters."""


class TraceSource:
    """Reads one trace topic. One thread at a time."""

    def __init__(
        self,
        reader: LogReader,
        dead_letters: LogWriter,
        expected_alignment: str | None,
        metrics: Metrics,
        *,
        topic: str,
    ) -> None:
        """`expected_alignment` is the fingerprint that records must have, None takes any; `topic` is the reader's name,
        for the dead letters."""
        self._reader, self._dead_letters, self._metrics = reader, dead_letters, metrics
        self._expected_alignment, self._topic = expected_alignment, topic
        self._unsettled: Polled | None = None

    def seek(self, offsets: Offsets) -> None:
        """Read on from here; partitions that are not named start at their first message.

        Raises:
            BusError: an offset lies outside the log.
        """
        self._reader.seek(offsets)
        self._unsettled = None

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
        return PolledRecords(tuple(records), polled.next_offsets, skipped)

    def _sorted(self, polled: Polled) -> tuple[list[tuple[int, int, TraceRecord]], list[Outgoing], Counter[str]]:
        records, letters, skipped = [], [], Counter[str]()
        for message in polled.messages:
            try:
                records.append((message.partition, message.offset, self._accepted(message)))
            except (WireError, VocabularyError) as exc:
                reason = _reason(exc)
                skipped[reason] += 1
                letters.append(self._dead_letter(message, reason, str(exc)))
        return records, letters, skipped

    def _accepted(self, message: Message) -> TraceRecord:
        record = codec.decode(message.value, message.headers)
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
        if len(message.value) > MAX_VALUE_BYTES:
            headers["cut_from_bytes"] = str(len(message.value)).encode()
        for name in list(message.headers)[:MAX_HEADERS]:
            headers[f"original.{name[:MAX_HEADER_BYTES]}"] = message.headers[name][:MAX_HEADER_BYTES]
        return Outgoing(message.key[:MAX_HEADER_BYTES], message.value[:MAX_VALUE_BYTES], headers)

    def _count(self, num_records: int, skipped: Counter[str]) -> None:
        self._metrics.add(READ, num_records)
        for reason, number in skipped.items():
            self._metrics.add(SKIPPED, number, reason=reason)


def _reason(exc: WireError | VocabularyError) -> str:
    match exc:
        case UnknownSchema():
            return "unknown_schema"
        case VocabularyError():
            return "other_alignment"
        case _:
            return "unreadable"
