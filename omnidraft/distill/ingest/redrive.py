"""Dead letters back to where they came from.

A message that was redriven names its letter in a header, in the same append. So whether a letter went already is asked
of its origin topic, all of which is read: a crash between two writes cannot make the answer wrong. It holds for as long
as the topic keeps the message. A message that is refused again is a letter of its own.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.dead_letters import DeadLetter, Place
from omnidraft.ports import LogReader, LogWriter, Message, Outgoing

REDRIVEN_FROM = "redriven_from"
"""Header of a redriven message: topic/partition/offset of its letter."""
BATCH_MESSAGES = 64
BATCH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """Which letters are wanted; one condition is enough."""

    reasons: frozenset[str] = frozenset()
    places: frozenset[Place] = frozenset()
    everything: bool = False

    def __contains__(self, letter: object) -> bool:
        return isinstance(letter, DeadLetter) and (
            self.everything or letter.reason in self.reasons or letter.place in self.places
        )


@dataclass(slots=True)
class Redriven:
    """What came of the chosen letters."""

    num_redriven: int = 0
    num_done_before: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By reason, in words."""
    found: set[Place] = field(default_factory=set)
    """Letters that were chosen by their place."""


class Redrive:
    """From one dead-letter topic to one origin topic."""

    def __init__(self, origin: LogWriter, *, topic: str, dead_letters_topic: str) -> None:
        """`topic` is the name of the origin; letters from others are refused."""
        self._origin, self._topic, self._dead_letters_topic = origin, topic, dead_letters_topic
        self.told = Redriven()

    def run(self, letters: Iterable[DeadLetter], choice: Choice, done: Container[str]) -> Redriven:
        """Append the chosen letters; those in `done` are passed over.

        Raises:
            BusError: the log refused. What went until then is in the log, and found there by the next run.
        """
        for batch in _batches(self._wanted(letters, choice, done)):
            self._origin.append(batch)
            self.told.num_redriven += len(batch)
        return self.told

    def _wanted(self, letters: Iterable[DeadLetter], choice: Choice, done: Container[str]) -> Iterator[Outgoing]:
        for letter in letters:
            if letter not in choice:
                continue
            self.told.found |= {letter.place} & choice.places
            name = self._name(letter)
            if name in done:
                self.told.num_done_before += 1
            elif refusal := self._refusal(letter):
                self.told.refused[refusal] += 1
            else:
                headers = {**letter.original_headers, REDRIVEN_FROM: name.encode()}
                yield Outgoing(letter.message.key, letter.message.value, headers)

    def _refusal(self, letter: DeadLetter) -> str | None:
        if letter.origin_topic != self._topic:
            return f"comes from another topic than {self._topic}"
        return letter.locked or letter.cut

    def _name(self, letter: DeadLetter) -> str:
        return "{}/{}/{}".format(self._dead_letters_topic, *letter.place)


def redriven_before(
    origin: LogReader, *, saw: Callable[[Message], None] = lambda message: None, idle_s: float = topic_scan.IDLE_S
) -> frozenset[str]:
    """Names of letters whose message lies in the origin topic again; `saw` is told each message. Raises BusError."""
    names = set()
    for message in topic_scan.messages(origin, idle_s=idle_s):
        saw(message)
        if REDRIVEN_FROM in message.headers:
            names.add(message.headers[REDRIVEN_FROM].decode(errors="replace"))
    return frozenset(names)


def _batches(messages: Iterable[Outgoing]) -> Iterator[list[Outgoing]]:
    batch: list[Outgoing] = []
    for message in messages:
        batch.append(message)
        if len(batch) >= BATCH_MESSAGES or sum(len(each.value) for each in batch) >= BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch
