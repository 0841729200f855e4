"""A reader of a log some of whose polls bring nothing, as Kafka's while a partition has no leader."""

from collections.abc import Container

from omnidraft.ports import PollResult
from omnidraft.testing.memory_log import MemoryLog, MemoryReader


class SilentReader(MemoryReader):
    """Its polls of these numbers, from 0, bring nothing at once."""

    def __init__(self, log: MemoryLog, topic: str, silent_polls: Container[int]) -> None:
        super().__init__(log, topic)
        self._silent_polls, self._num_polls = silent_polls, 0

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        self._num_polls += 1
        if self._num_polls - 1 in self._silent_polls:
            return PollResult((), {})
        return super().poll(max_messages, timeout_s)
