"""All of a topic: from its first message to where it ended when reading began."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from omnidraft.ports import LogReader, Message, Offsets

POLL_MESSAGES = 256
POLL_TIMEOUT_S = 1.0
IDLE_S = 10.0
"""Without a message: what a partition still owes is not there any more."""


class Moving(Protocol):
    """What a poll gave, of a log or of a source."""

    @property
    def next_offsets(self) -> Offsets: ...


Poll = TypeVar("Poll", bound=Moving)


def polls_until(poll: Callable[[], Poll], ends: Offsets, *, idle_s: float = IDLE_S) -> Iterator[Poll]:
    """What `poll` gives until every partition reached its end, or nothing came for so long; it may go past the ends."""
    waiting = {partition for partition, end in ends.items() if end > 0}
    heard_s = time.monotonic()
    while waiting:
        polled = poll()
        if polled.next_offsets:
            heard_s = time.monotonic()
            yield polled
        elif time.monotonic() - heard_s >= idle_s:
            return
        waiting -= {partition for partition, offset in polled.next_offsets.items() if offset >= ends[partition]}


def messages(reader: LogReader, *, idle_s: float = IDLE_S) -> Iterator[Message]:
    """Every message that is there now, in offset order within each partition. Raises BusError."""
    ends = reader.end_offsets()
    reader.seek({})
    for polled in polls_until(lambda: reader.poll(POLL_MESSAGES, POLL_TIMEOUT_S), ends, idle_s=idle_s):
        yield from (message for message in polled.messages if message.offset < ends[message.partition])
