"""What only the SQLite log has to promise: several processes, and errors in our own words."""

import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.errors import BusError
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
