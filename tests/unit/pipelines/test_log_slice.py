"""A slice of a log is all that the log held when reading began, or an error."""

import pytest

from omnidraft.errors import BusError
from omnidraft.ports import Offsets, Outgoing, PollResult
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from pipelines.lib import log_slice


class SilentReader(MemoryReader):
    """Its second partition never answers."""

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        for _ in self.partitions():
            polled = super().poll(max_messages, 0)
            if 1 not in polled.next_offsets:
                return polled
        return PollResult((), {})


class ExpiredReader(SilentReader):
    """Retention has deleted all messages of the second partition."""

    def first_offsets(self) -> Offsets:
        return dict(super().first_offsets()) | {1: super().end_offsets()[1]}


@pytest.fixture
def log() -> MemoryLog:
    """Two partitions with a message each."""
    made = MemoryLog(partitions=2)
    MemoryWriter(made, "t").append([Outgoing(b"k", b"0", partition=0), Outgoing(b"k", b"1", partition=1)])
    return made


def test_a_partition_that_never_answers_is_an_error(log: MemoryLog) -> None:
    assert len(list(log_slice._messages(MemoryReader(log, "t"), idle_s=0))) == 2
    with pytest.raises(BusError, match="partition 1 of the log gave nothing more at offset 0"):
        list(log_slice._messages(SilentReader(log, "t"), idle_s=0))


def test_a_partition_whose_messages_have_expired_has_none(log: MemoryLog) -> None:
    assert [each.value for each in log_slice._messages(ExpiredReader(log, "t"), idle_s=0)] == [b"0"]
