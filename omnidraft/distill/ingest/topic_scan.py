"""Bounded reads of a topic: all that it holds when reading begins, or its newest records."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Protocol, TypeVar

from omnidraft.distill.ingest.trace_consumer import RecordAt, TraceConsumer
from omnidraft.errors import BusError
from omnidraft.ports import LogReader, Message, Offsets
from omnidraft.traces.record import TraceRecord

POLL_MESSAGES = 256
POLL_TIMEOUT_S = 1.0
IDLE_S = 30.0
"""Seconds without a message after which a read fails, where nothing else is said; see idle_timeout_s."""
DRIFT_RECORDS = 16
"""The newest records of a drifting tenant on which earlier snapshots are compared: few, so that they are all new."""
LOOK_BACK = 400
"""Newest messages of each partition among which a tenant's records are looked for."""
MAX_REREAD = 4_000
"""Newest messages of each partition of which the n-gram cache is rebuilt."""


class HasNextOffsets(Protocol):
    """The result of a poll, of a log or of a trace consumer."""

    @property
    def next_offsets(self) -> Offsets: ...


class HasOffsets(Protocol):
    """A reader of a log, or a trace consumer."""

    def first_offsets(self) -> Offsets: ...


Poll = TypeVar("Poll", bound=HasNextOffsets)


def polls_until(
    poll: Callable[[], Poll], ends: Offsets, *, idle_s: float = IDLE_S, must_reach_ends: bool = False
) -> Iterator[Poll]:
    """Yield polls until every partition reached its end, which they may pass, or nothing came for `idle_s` seconds.
    Raises BusError in the latter case with `must_reach_ends`."""
    waiting = {partition for partition, end in ends.items() if end > 0}
    last_message_s = time.monotonic()
    while waiting:
        polled = poll()
        if polled.next_offsets:
            last_message_s = time.monotonic()
            yield polled
        elif time.monotonic() - last_message_s >= idle_s:
            if must_reach_ends:
                raise BusError(f"partitions {sorted(waiting)} gave nothing for {idle_s:.0f} s before their ends {ends}")
            return
        waiting -= {partition for partition, offset in polled.next_offsets.items() if offset >= ends.get(partition, 0)}


def idle_timeout_s(request_timeout_s: float) -> float:
    """Return after how many seconds without a message a log that answers within `request_timeout_s` has failed: a Kafka
    reader passes offsets that give nothing after two of them."""
    return 3 * request_timeout_s


def messages(reader: LogReader, *, idle_s: float = IDLE_S) -> Iterator[Message]:
    """Yield every message that is there now, in offset order within each partition.

    Raises:
        BusError: the log does not answer, or gives nothing for `idle_s` seconds before its end.
    """
    ends = reader.end_offsets()
    reader.seek({})
    poll = partial(reader.poll, POLL_MESSAGES, POLL_TIMEOUT_S)
    for polled in polls_until(poll, still_there(reader, ends), idle_s=idle_s, must_reach_ends=True):
        yield from (message for message in polled.messages if message.offset < ends.get(message.partition, 0))


def still_there(log: HasOffsets, ends: Offsets) -> Offsets:
    """Return the ends of the partitions of which retention has left something, asked last, so that nobody waits for
    what was deleted by now."""
    firsts = log.first_offsets()
    return {partition: end for partition, end in ends.items() if firsts.get(partition, 0) < end}


class RecentRecords:
    """The newest records in the log, read from its end, wherever the learner stands. Not thread-safe."""

    def __init__(
        self,
        open_reader: Callable[[], LogReader],
        source_over: Callable[[LogReader], TraceConsumer],
        num_records: int,
        *,
        idle_s: float = IDLE_S,
    ) -> None:
        """
        Args:
            open_reader: opens a reader of the trace topic, which is closed after each look.
            source_over: a consumer of the pair over a reader; it must not write dead letters, the learner does.
            idle_s: seconds without a message, before the end of the log, after which a look fails.
        """
        self._open_reader, self._source_over = open_reader, source_over
        self._num_records, self._idle_s = num_records, idle_s

    def of(self, tenant: str) -> list[RecordAt]:
        """Return the tenant's newest records among the last LOOK_BACK messages, in offset order within each partition.
        Raises BusError."""
        newest: deque[RecordAt] = deque(maxlen=self._num_records)
        newest.extend(each for each in self._last(LOOK_BACK) if each[2].tenant == tenant)
        return list(newest)

    def before(self, offsets: Offsets) -> list[TraceRecord]:
        """Return the records among the last MAX_REREAD messages that lie before these offsets. Raises BusError."""
        return [record for partition, offset, record in self._last(MAX_REREAD) if offset < offsets.get(partition, 0)]

    def _last(self, num_messages: int) -> Iterator[RecordAt]:
        """Yield the records among the last so many messages of each partition. Raises BusError."""
        with closing(self._open_reader()) as reader:
            consumer = self._source_over(reader)
            ends = consumer.end_offsets()
            consumer.seek_back(num_messages)
            ends = still_there(consumer, ends)
            poll = partial(consumer.poll, POLL_MESSAGES, POLL_TIMEOUT_S)
            for polled in polls_until(poll, ends, idle_s=self._idle_s, must_reach_ends=True):
                yield from polled.records
