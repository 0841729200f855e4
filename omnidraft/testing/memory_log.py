"""A log in this process's memory, for tests and for runs that need no durability.

It uses all the freedom that the port allows: a poll gives a few messages of one partition, never all there are.
"""

import time
import uuid
import zlib
from collections.abc import Sequence
from threading import Condition

from omnidraft.errors import OffsetOutOfRange
from omnidraft.ports import Message, Offsets, Outgoing, PollResult

MAX_PER_POLL = 3


class MemoryLog:
    """Topics by name. All writers and readers of one process share one log."""

    def __init__(self, partitions: int = 1) -> None:
        self.num_partitions = partitions
        self.changed = Condition()
        self._topics: dict[str, tuple[list[Message], ...]] = {}
        self.id = uuid.uuid4().hex

    def topic(self, name: str) -> tuple[list[Message], ...]:
        """Return the messages of every partition; a missing topic is created."""
        with self.changed:
            return self._topics.setdefault(name, tuple([] for _ in range(self.num_partitions)))


class MemoryWriter:
    """LogWriter of one topic."""

    def __init__(self, log: MemoryLog, topic: str) -> None:
        self._log, self._partitions = log, log.topic(topic)

    def append(self, messages: Sequence[Outgoing]) -> None:
        with self._log.changed:
            for message in messages:
                partition = zlib.crc32(message.key) % len(self._partitions)
                if message.partition is not None:
                    partition = message.partition
                log = self._partitions[partition]
                now_ms = time.time_ns() // 1_000_000
                headers = dict(message.headers)
                log.append(Message(partition, len(log), message.key, message.value, headers, now_ms))
            self._log.changed.notify_all()

    def close(self) -> None: ...


class MemoryReader:
    """LogReader of one topic."""

    def __init__(self, log: MemoryLog, topic: str) -> None:
        self._log, self._topic, self._partitions = log, topic, log.topic(topic)
        self._positions = dict.fromkeys(self.partitions(), 0)
        self._turn = 0

    def partitions(self) -> tuple[int, ...]:
        return tuple(range(len(self._partitions)))

    def seek(self, offsets: Offsets) -> None:
        ends = self.end_offsets()
        for partition, offset in offsets.items():
            if partition not in ends or not 0 <= offset <= ends[partition]:
                where = f"{self._topic}[{partition}]"
                raise OffsetOutOfRange(f"{where}: offset {offset} lies outside the log, ends are {ends}")
        self._positions = dict.fromkeys(self.partitions(), 0) | dict(offsets)

    def seek_back(self, num_messages: int) -> None:
        self._positions = {partition: max(0, end - num_messages) for partition, end in self.end_offsets().items()}

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        with self._log.changed:
            self._log.changed.wait_for(self._has_messages, timeout_s)
            self._turn += 1
            for partition in self._rotated_partitions():
                start = self._positions[partition]
                messages = self._partitions[partition][start : start + min(max_messages, MAX_PER_POLL)]
                if messages:
                    self._positions[partition] = start + len(messages)
                    return PollResult(tuple(messages), {partition: start + len(messages)})
        return PollResult((), {})

    def first_offsets(self) -> Offsets:
        return dict.fromkeys(self.partitions(), 0)

    def identity(self) -> str:
        return f"{self._log.id}/{self._topic}"

    def end_offsets(self) -> Offsets:
        with self._log.changed:
            return {partition: len(messages) for partition, messages in enumerate(self._partitions)}

    def close(self) -> None: ...

    def _has_messages(self) -> bool:
        return any(len(messages) > self._positions[partition] for partition, messages in enumerate(self._partitions))

    def _rotated_partitions(self) -> tuple[int, ...]:
        names = self.partitions()
        start = self._turn % len(names)
        return names[start:] + names[:start]
