"""All of a topic: from its first message to where it ended when reading began."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Protocol, TypeVar

from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.ports import LogReader, Message, Offsets
from omnidraft.traces.record import TraceRecord

POLL_MESSAGES = 256
POLL_TIMEOUT_S = 1.0
LOOK_BACK = 400
"""Messages of each partition that are looked through."""
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


class RecentRecords:
    """One pair's. One thread."""

    def __init__(
        self, open_reader: Callable[[], LogReader], source_over: Callable[[LogReader], TraceConsumer], num_records: int
    ) -> None:
        """
        Args:
            open_reader: a reader of the trace topic; there is one only while records are looked for.
            source_over: its dead letters are written by who learns.
        """
        self._open_reader, self._source_over, self._num_records = open_reader, source_over, num_records

    def of(self, tenant: str) -> list[TraceRecord]:
        """The newest of LOOK_BACK messages, oldest first. Raises BusError."""
        newest: deque[TraceRecord] = deque(maxlen=self._num_records)
        poll = POLL_MESSAGES, POLL_TIMEOUT_S
        with closing(self._open_reader()) as reader:
            source = self._source_over(reader)
            ends = source.end_offsets()
            source.seek_back(LOOK_BACK)
            for polled in polls_until(lambda: source.poll(*poll), ends, idle_s=POLL_TIMEOUT_S):
                newest.extend(record for _, _, record in polled.records if record.tenant == tenant)
        return list(newest)
