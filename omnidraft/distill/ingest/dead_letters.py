"""Dead letters as their readers see them; trace_consumer.py writes them.

Anybody may write to the log, so no header is taken for granted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.trace_consumer import MAX_HEADER_BYTES, MAX_HEADERS, PartitionOffset
from omnidraft.ports import LogReader, Message
from omnidraft.traces.schema import ENCRYPTION

ORIGINAL = "original."
"""Prefix of the headers that the message had."""
MAX_MESSAGES = 1 << 20
"""Upper bound on the number of messages that a dead letter may claim to stand for."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message of the dead-letter topic."""

    message: Message

    @property
    def position(self) -> PartitionOffset:
        """Its position in the dead-letter topic."""
        return self.message.partition, self.message.offset

    @property
    def reason(self) -> str:
        return self._text("reason")

    @property
    def error(self) -> str:
        return self.locked or self._text("error")

    @property
    def locked(self) -> str | None:
        """The reason why the dead letter itself cannot be read; None when it can."""
        is_locked = ENCRYPTION in self.message.headers
        return "encrypted with a key that is not among log.encryption_keys" if is_locked else None

    @property
    def origin_topic(self) -> str:
        return self._text("origin_topic")

    @property
    def origin(self) -> PartitionOffset | None:
        """The message's position in its own topic; None when the dead letter does not say."""
        partition, offset = self._number("origin_partition"), self._number("origin_offset")
        return None if partition is None or offset is None else (partition, offset)

    @property
    def num_messages(self) -> int:
        """The number of offsets that it stands for, from its origin on: more than one when a damaged batch cannot be
        taken apart."""
        return min(self._number("origin_num_messages") or 1, MAX_MESSAGES)

    @property
    def original_headers(self) -> Mapping[str, bytes]:
        headers = self.message.headers
        return {name.removeprefix(ORIGINAL): headers[name] for name in headers if name.startswith(ORIGINAL)}

    @property
    def original_bytes(self) -> int:
        """The size of the message's value before it was cut."""
        return self._number("cut_from_bytes") or len(self.message.value)

    @property
    def cut(self) -> str | None:
        """The missing part of the message; None when it is whole.

        A damaged batch has no message at all. Keys and headers are cut without a note, so one that has exactly the
        maximal length counts as cut.
        """
        if "raw" in self.message.headers:
            return "the value is damaged bytes of the log, not a message"
        if "cut_from_bytes" in self.message.headers:
            return f"the value has {len(self.message.value)} of {self._text('cut_from_bytes')} bytes"
        if len(self.message.key) >= MAX_HEADER_BYTES:
            return f"the key is cut at {MAX_HEADER_BYTES} bytes"
        headers = self.original_headers
        if len(headers) >= MAX_HEADERS:
            return f"headers behind the first {MAX_HEADERS} are missing"
        if any(max(len(name), len(value)) >= MAX_HEADER_BYTES for name, value in headers.items()):
            return f"a header is cut at {MAX_HEADER_BYTES} bytes"
        return None

    def _text(self, name: str) -> str:
        return self.message.headers.get(name, b"").decode(errors="replace")

    def _number(self, name: str) -> int | None:
        text = self._text(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def read(reader: LogReader, *, idle_s: float = topic_scan.IDLE_S) -> Iterator[DeadLetter]:
    """Yield all that are there now, in offset order within each partition. Raises BusError."""
    return (DeadLetter(message) for message in topic_scan.messages(reader, idle_s=idle_s))
