"""Dead letters as their readers see them, and redrive, which appends them again to the topics that they came from;
trace_consumer.py writes them.

Anybody may write to the log, so no header is taken for granted.
A message that was redriven names its dead letter in a header, in the same append. So the origin topic, all of which is
read, says which dead letters were redriven already, and a crash between two writes cannot make that wrong. It holds for
as long as the topic keeps the message. A message that is refused again is a dead letter of its own.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.trace_consumer import MAX_HEADER_BYTES, MAX_HEADERS, PartitionOffset
from omnidraft.ports import LogReader, LogWriter, Message, Outgoing
from omnidraft.traces.schema import ENCRYPTION, FORGOTTEN, KEY_ID

ORIGINAL = "original."
"""Prefix of the headers that the message had."""
MAX_MESSAGES = 1 << 20
"""Upper bound on the number of messages that a dead letter may claim to stand for."""
REDRIVEN_FROM = "redriven_from"
"""Header of a redriven message: topic/partition/offset of its dead letter."""
BATCH_MESSAGES = 64
BATCH_BYTES = 4 << 20


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
        if FORGOTTEN in self.message.headers:
            return "its tenant was forgotten"
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
        if "origin_num_messages" in self.message.headers:
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


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection of dead letters; one condition is enough."""

    reasons: frozenset[str] = frozenset()
    positions: frozenset[PartitionOffset] = frozenset()
    everything: bool = False

    def __contains__(self, dead_letter: object) -> bool:
        return isinstance(dead_letter, DeadLetter) and (
            self.everything or dead_letter.reason in self.reasons or dead_letter.position in self.positions
        )


@dataclass(slots=True)
class Redriven:
    """The outcome for the chosen dead letters."""

    num_redriven: int = 0
    num_done_before: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Number refused, by reason."""
    matched: set[PartitionOffset] = field(default_factory=set)
    """The positions by which dead letters were chosen."""


class Redrive:
    """The redrive from one dead-letter topic to one origin topic."""

    def __init__(self, origin: LogWriter, *, topic: str, dead_letters_topic: str) -> None:
        """`topic` is the name of the origin; dead letters from other topics are refused."""
        self._origin, self._topic, self._dead_letters_topic = origin, topic, dead_letters_topic
        self.result = Redriven()

    def run(self, dead_letters: Iterable[DeadLetter], choice: Choice, done: Container[str]) -> Redriven:
        """Append the chosen dead letters except those in `done`, and return the outcome.

        Raises:
            BusError: the log refused. The messages before are in the log, and the next run finds them there.
        """
        for batch in _batches(self._outgoing(dead_letters, choice, done)):
            self._origin.append(batch)
            self.result.num_redriven += len(batch)
        return self.result

    def _outgoing(self, dead_letters: Iterable[DeadLetter], choice: Choice, done: Container[str]) -> Iterator[Outgoing]:
        for dead_letter in dead_letters:
            if dead_letter not in choice:
                continue
            self.result.matched |= {dead_letter.position} & choice.positions
            identifier = self._identifier(dead_letter)
            if identifier in done:
                self.result.num_done_before += 1
            elif refusal := self._refusal(dead_letter):
                self.result.refused[refusal] += 1
            else:
                letters = dead_letter.message.headers
                own_key = {KEY_ID: letters[KEY_ID]} if KEY_ID in letters else {}  # of a record that was poison
                headers = {**own_key, **dead_letter.original_headers, REDRIVEN_FROM: identifier.encode()}
                yield Outgoing(dead_letter.message.key, dead_letter.message.value, headers)

    def _refusal(self, dead_letter: DeadLetter) -> str | None:
        if dead_letter.origin_topic != self._topic:
            return f"comes from another topic than {self._topic}"
        return dead_letter.locked or dead_letter.cut

    def _identifier(self, dead_letter: DeadLetter) -> str:
        return "{}/{}/{}".format(self._dead_letters_topic, *dead_letter.position)


def redriven_before(
    origin: LogReader,
    *,
    on_message: Callable[[Message], None] = lambda message: None,
    idle_s: float = topic_scan.IDLE_S,
) -> frozenset[str]:
    """Return the identifiers of dead letters whose message is in the origin topic again. Raises BusError.

    Args:
        on_message: called with each message that was read.
    """
    identifiers = set()
    for message in topic_scan.messages(origin, idle_s=idle_s):
        on_message(message)
        if REDRIVEN_FROM in message.headers:
            identifiers.add(message.headers[REDRIVEN_FROM].decode(errors="replace"))
    return frozenset(identifiers)


def _batches(messages: Iterable[Outgoing]) -> Iterator[list[Outgoing]]:
    batch: list[Outgoing] = []
    for message in messages:
        batch.append(message)
        if len(batch) >= BATCH_MESSAGES or sum(len(each.value) for each in batch) >= BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch
