"""A bounded read returns what the topic held when it began, and ends."""

from pathlib import Path

import pytest

from omnidraft.audit.run import DiscardingWriter
from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter, delete_before
from omnidraft.distill.ingest.topic_scan import RecentRecords, messages, polls_until
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.errors import BusError
from omnidraft.ports import LogReader, Offsets, Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.traces import codec
from tests.silent_reader import SilentReader
from tests.trace_records import make_record


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


def test_a_read_of_all_fails_while_the_log_is_silent_instead_of_giving_less() -> None:
    log = MemoryLog()
    MemoryWriter(log, "t").append([Outgoing(b"k", b"v") for _ in range(5)])  # the memory log gives three a poll
    with pytest.raises(BusError, match="gave nothing for 0 s before their ends"):
        list(messages(SilentReader(log, "t", (1,)), idle_s=0))
    assert len(list(messages(SilentReader(log, "t", ()), idle_s=0))) == 5


def test_a_read_of_all_does_not_wait_for_what_retention_has_deleted(tmp_path: Path) -> None:
    writer = SqliteWriter(tmp_path / "log.db", "t")
    writer.append([Outgoing(b"k", b"v") for _ in range(3)])
    delete_before(tmp_path / "log.db", "t", {0: 3})
    assert list(messages(SqliteReader(tmp_path / "log.db", "t"), idle_s=3600)) == []


def test_polls_of_a_partition_that_is_added_are_yielded_too_and_do_not_end_the_others():
    reader = make_reader()
    polls = polls_until(lambda: reader.poll(10, 0), reader.end_offsets(), idle_s=0)
    assert [message.value for polled in polls for message in polled.messages] == [b"added", b"known"]


def recent_over(reader: LogReader) -> RecentRecords:
    def source_over(reader: LogReader) -> TraceConsumer:
        return TraceConsumer(reader, DiscardingWriter(), None, CountingMetrics(), topic="t")

    return RecentRecords(lambda: reader, source_over, 8, idle_s=0)


def outgoing(name: str) -> Outgoing:
    record = make_record(name)
    return Outgoing(codec.key(record), codec.encode(record), codec.headers(record))


def test_a_look_at_the_newest_records_fails_while_the_log_is_silent_instead_of_returning_fewer() -> None:
    log = MemoryLog()
    MemoryWriter(log, "t").append([outgoing(name) for name in "abcde"])  # the memory log gives three messages a poll
    recent = recent_over(SilentReader(log, "t", (0, 2, 3)))
    for look in (lambda: recent.before({0: 5}), lambda: recent.before({0: 5}), lambda: recent.of("default")):
        with pytest.raises(BusError, match="gave nothing"):
            look()
    assert [record.request_id for record in recent.before({0: 5})] == list("abcde")


def test_what_retention_deleted_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    SqliteWriter(path, "t").append([outgoing(name) for name in "abc"])
    delete_before(path, "t", {0: 3})
    assert recent_over(SqliteReader(path, "t")).before({0: 3}) == []
