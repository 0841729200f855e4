"""A bounded read returns what the topic held when it began, and ends."""

from omnidraft.distill.ingest.topic_scan import messages, polls_until
from omnidraft.ports import Offsets, Outgoing
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter


class GrowingReader(MemoryReader):
    """Its topic gets the second partition after the ends were read; a message of that one is returned first."""

    def end_offsets(self) -> Offsets:
        return {0: super().end_offsets()[0]}


def make_reader() -> GrowingReader:
    log = MemoryLog(partitions=2)
    MemoryWriter(log, "t").append([Outgoing(b"k", b"known", partition=0), Outgoing(b"k", b"added", partition=1)])
    return GrowingReader(log, "t")


def test_a_partition_that_is_added_while_a_topic_is_read_is_left_out():
    assert [message.value for message in messages(make_reader(), idle_s=0)] == [b"known"]


def test_polls_of_a_partition_that_is_added_are_yielded_too_and_do_not_end_the_others():
    reader = make_reader()
    polls = polls_until(lambda: reader.poll(10, 0), reader.end_offsets(), idle_s=0)
    assert [message.value for polled in polls for message in polled.messages] == [b"added", b"known"]
