"""Redrive: dead letters appended again to the topics that they came from.

A message that was redriven names its dead letter in a header, in the same append. So the origin topic, all of which is
read, says which dead letters were redriven already, and a crash between two writes cannot make that wrong. It holds for
as long as the topic keeps the message. A message that is refused again is a dead letter of its own.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.dead_letters import DeadLetter
from omnidraft.distill.ingest.trace_consumer import PartitionOffset
from omnidraft.ports import LogReader, LogWriter, Message, Outgoing

REDRIVEN_FROM = "redriven_from"
"""Header of a redriven message: topic/partition/offset of its dead letter."""
BATCH_MESSAGES = 64
BATCH_BYTES = 4 << 20


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
                headers = {**dead_letter.original_headers, REDRIVEN_FROM: identifier.encode()}
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
