"""Guarantees of the SQLite log alone: several processes, and errors of our own."""

import math
import multiprocessing
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from omnidraft.bus.sqlite_log import MAX_EXPIRED, SqliteReader, SqliteWriter
from omnidraft.bus.sqlite_topic import SqliteTopic
from omnidraft.errors import BusError, OffsetOutOfRange
from omnidraft.ports import Outgoing


def append_hundred(path: Path, name: str) -> None:
    writer = SqliteWriter(path, "t", partitions=2)
    for number in range(100):
        writer.append([Outgoing(name.encode(), f"{name} {number}".encode())])
    writer.close()


def test_two_processes_append_at_once_without_a_gap_or_a_loss(tmp_path):
    """Both also create the file, its tables and the topic at once."""
    path = tmp_path / "log.db"
    fork = multiprocessing.get_context("fork")
    appenders = [fork.Process(target=append_hundred, args=(path, name)) for name in ("one", "two")]
    for appender in appenders:
        appender.start()
    for appender in appenders:
        appender.join(60)
    assert [appender.exitcode for appender in appenders] == [0, 0]
    reader = SqliteReader(path, "t")
    messages = reader.poll(1000, timeout_s=1.0).messages
    for partition in reader.partitions():
        offsets = [m.offset for m in messages if m.partition == partition]
        assert offsets == list(range(len(offsets)))
    for name in ("one", "two"):
        written = [m.value.decode() for m in messages if m.key.decode() == name]
        assert written == [f"{name} {number}" for number in range(100)]
    reader.close()


READS_AND_LEAVES = """
import sys
from pathlib import Path
from omnidraft.bus.sqlite_log import SqliteReader
reader = SqliteReader(Path(sys.argv[1]), "t")
print(len(reader.poll(100, 0.0).messages))
reader.close()
"""


def num_read_elsewhere(path: Path) -> int:
    """By a process that opens the file and leaves, like a command line."""
    command = [sys.executable, "-c", READS_AND_LEAVES, path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.long
def test_a_process_that_leaves_takes_nothing_of_one_with_several_topics(tmp_path):
    """A worker opens its control topic after its traces. It holds its locks on the file still, so whoever leaves is not
    the last one, and does not delete the WAL that the worker goes on to write."""
    path = tmp_path / "log.db"
    writer = SqliteWriter(path, "t")
    writer.append([Outgoing(b"", b"1")])
    control = SqliteReader(path, "control")
    assert num_read_elsewhere(path) == 1
    writer.append([Outgoing(b"", b"2")])
    assert num_read_elsewhere(path) == 2
    control.close()
    writer.close()
    assert num_read_elsewhere(path) == 2


def test_a_writer_that_waits_too_long_for_another_raises_bus_error(tmp_path):
    path = tmp_path / "log.db"
    writer = SqliteWriter(path, "t", timeout_s=0.1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(BusError, match="locked"):
        writer.append([Outgoing(b"k", b"v")])
    other.execute("COMMIT")
    writer.append([Outgoing(b"k", b"v")])
    other.close()
    writer.close()


def test_an_append_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "log.db"
    writer = SqliteWriter(path, "t")
    with pytest.raises(BusError):
        writer.append([Outgoing(b"k", b"fine"), Outgoing(b"k", None)])
    writer.append([Outgoing(b"k", b"next")])
    writer.close()
    reader = SqliteReader(path, "t")
    assert [(m.offset, m.value) for m in reader.poll(10, timeout_s=1.0).messages] == [(0, b"next")]
    reader.close()


def test_a_file_that_is_no_database_is_named(tmp_path):
    path = tmp_path / "log.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(BusError, match=r"log\.db"):
        SqliteWriter(path, "t", timeout_s=0.1)


def test_a_folder_that_cannot_be_made_is_a_bus_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BusError):
        SqliteReader(tmp_path / "file" / "log.db", "t")


def age(path: Path, hours: float, where: str = "1") -> None:
    """Make messages older than they are, and the clock's hold long enough ago for the clock to be trusted."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE topics SET held_from_ms = -1000000000")
        connection.execute(f"UPDATE messages SET timestamp_ms = timestamp_ms - ? WHERE {where}", (hours * 3_600_000,))


def held(path: Path, topic: str = "t") -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT offset FROM messages WHERE topic = ? ORDER BY offset", (topic,))
        return [offset for (offset,) in rows]


def write(path: Path, *values: bytes, topic: str = "t", keep_s: float | None = None) -> None:
    with closing(SqliteWriter(path, topic, keep_s=keep_s)) as writer:
        writer.append([Outgoing(b"k", value) for value in values])


def test_a_writer_deletes_what_is_older_than_it_keeps_and_numbers_go_on(tmp_path):
    path = tmp_path / "log.db"
    write(path, b"0", b"1", b"2")
    age(path, 2, "offset < 2")
    write(path, b"3", keep_s=3600)
    assert held(path) == [2, 3]
    with closing(SqliteReader(path, "t")) as reader:
        reader.seek_back(4)
        assert [message.offset for message in reader.poll(10, timeout_s=0.0).messages] == [2, 3]
    age(path, 2)
    write(path, b"4", keep_s=3600)
    assert held(path) == [4]
    age(path, 2)
    write(path, keep_s=3600)
    assert held(path) == []
    write(path, b"5", keep_s=3600)
    assert held(path) == [5]  # never a number twice


@pytest.mark.parametrize("keep_s", [None, math.inf])
def test_without_a_limit_everything_is_kept(tmp_path, keep_s):
    path = tmp_path / "log.db"
    write(path, b"0")
    age(path, 1_000_000)
    write(path, b"1", keep_s=keep_s)
    assert held(path) == [0, 1]


def test_only_the_writers_own_topic_expires(tmp_path):
    path = tmp_path / "log.db"
    write(path, b"0", topic="control")
    write(path, b"0")
    age(path, 2)
    write(path, b"1", keep_s=3600)
    assert (held(path), held(path, "control")) == ([1], [0])


def test_an_append_deletes_a_bounded_number_and_appends_catch_up(tmp_path):
    path = tmp_path / "log.db"
    write(path, *[b""] * (2 * MAX_EXPIRED + 10))
    age(path, 2)
    with closing(SqliteWriter(path, "t", keep_s=3600)) as writer:
        assert len(held(path)) == MAX_EXPIRED + 10
        for left in (11, 2, 3):
            writer.append([Outgoing(b"k", b"")])
            assert len(held(path)) == left


def test_what_expired_is_not_in_the_file_any_more(tmp_path):
    path, payload = tmp_path / "log.db", b"what a user said, long ago"
    write(path, payload, b"later")
    assert any(payload in file.read_bytes() for file in tmp_path.iterdir())
    age(path, 2, "offset = 0")
    write(path, b"now", keep_s=3600)
    assert held(path) == [1, 2]
    assert not any(payload in file.read_bytes() for file in tmp_path.iterdir())


def test_a_reader_is_told_that_what_it_reads_next_expired_and_never_passes_over_it(tmp_path):
    path = tmp_path / "log.db"
    write(path, b"0", b"1", b"2")
    reader, late = SqliteReader(path, "t"), SqliteReader(path, "t")
    assert len(reader.poll(10, timeout_s=0).messages) == 3
    age(path, 2)
    write(path, keep_s=3600)
    for _ in range(2):
        with pytest.raises(BusError, match=r"offset 0 lies outside the log, it holds 3 to 3"):
            late.poll(10, timeout_s=0)
    assert reader.poll(10, timeout_s=0).messages == ()
    write(path, b"3")
    assert [m.value for m in reader.poll(10, timeout_s=0).messages] == [b"3"]
    with pytest.raises(BusError, match=r"offset 0 lies outside the log, it holds 3 to 4"):
        late.poll(10, timeout_s=0)
    with pytest.raises(BusError, match="outside the log"):
        late.seek({0: 2})
    late.seek({})
    assert [m.value for m in late.poll(10, timeout_s=0).messages] == [b"3"]
    reader.close()
    late.close()


def test_a_log_that_is_replaced_by_one_with_other_partitions_is_read_in_all_of_them(tmp_path):
    path = tmp_path / "log.db"
    SqliteWriter(path, "t", partitions=1).close()
    with closing(SqliteReader(path, "t")) as reader:
        assert reader.partitions() == (0,)
        identity = reader.identity()
        path.unlink()
        with closing(SqliteWriter(path, "t", partitions=3)) as writer:
            writer.append([Outgoing(f"key {number}".encode(), b"value") for number in range(30)])
        with pytest.raises(OffsetOutOfRange, match="was replaced"):
            reader.poll(100, 0.0)
        assert reader.identity() != identity
        reader.seek({})
        messages = [message for _ in range(3) for message in reader.poll(100, 0.0).messages]
    assert (len(messages), {message.partition for message in messages}) == (30, {0, 1, 2})


def test_a_log_whose_opening_failed_half_way_is_opened_again(tmp_path, monkeypatch):
    """As on a disk that was full for a moment: the file is there by then, without its tables."""
    path = tmp_path / "log.db"
    writer, reader = SqliteWriter(path, "t"), SqliteReader(path, "t")
    create, failures = SqliteTopic._create, ["once for the writer"]

    def create_or_fail(topic: SqliteTopic) -> None:
        if failures:
            raise sqlite3.OperationalError(f"database or disk is full {failures.pop()}")
        create(topic)

    monkeypatch.setattr(SqliteTopic, "_create", create_or_fail)
    path.unlink()
    with pytest.raises(BusError, match="disk is full once for the writer"):
        writer.append([Outgoing(b"k", b"refused")])
    writer.append([Outgoing(b"k", b"v")])
    failures.append("once for the reader")
    with pytest.raises(BusError, match="disk is full once for the reader"):
        reader.seek({})
    assert reader.identity()
    with pytest.raises(OffsetOutOfRange, match="was replaced"):
        reader.poll(10, 0.0)
    reader.seek({})
    assert [message.value for message in reader.poll(10, 0.0).messages] == [b"v"]
    writer.close()
    reader.close()
