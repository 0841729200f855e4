"""One topic in an SQLite file: its connection, tables, first and next offsets, and identity.

A file that replaces an open one is opened instead.
"""

import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from omnidraft.errors import BusError, OffsetOutOfRange
from omnidraft.ports import TopicFacts
from omnidraft.private_files import PRIVATE, create

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS partitions (topic TEXT, partition INTEGER, next_offset INTEGER NOT NULL,"
    " PRIMARY KEY (topic, partition))",
    "CREATE TABLE IF NOT EXISTS messages (topic TEXT, partition INTEGER, offset INTEGER, key BLOB NOT NULL,"
    " value BLOB NOT NULL, headers TEXT NOT NULL, timestamp_ms INTEGER NOT NULL,"
    " PRIMARY KEY (topic, partition, offset))",
    "CREATE TABLE IF NOT EXISTS topics (topic TEXT PRIMARY KEY, id TEXT NOT NULL, held_from_ms INTEGER)",
)


class SqliteTopic:
    """A connection and one topic in it; a missing topic is created with `partitions` partitions."""

    def __init__(self, path: Path, name: str, partitions: int, timeout_s: float) -> None:
        self.path, self.name = path, name
        self._num_partitions, self._timeout_s = partitions, timeout_s
        self.was_replaced = False
        """Whether another file replaced this one; the reader that handles it resets this."""
        self._file: tuple[int, int] | None = None
        """The identity of the open file; None while it is not open with all its tables."""
        with self.translate_errors("opening"):
            self._open()

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Translate the errors of SQLite and the file system into BusError."""
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            raise BusError(f"{action} {self.name} in {self.path}: {exc}") from exc

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Run one transaction in the file that is at the path now, rolled back on any error."""
        self.follow_file()
        with self._transaction():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:  # a full disk has rolled it back already
                self.connection.execute("ROLLBACK")
            raise

    def follow_file(self) -> None:
        """Open the file that is at the path now, if it is another one or could not be opened."""
        if self._file is None or _file_identity(self.path) != self._file:
            self.connection.close()
            self._file, self.was_replaced = None, True
            self._open()

    def next_offsets(self) -> dict[int, int]:
        """Return the offset after the last message of every partition. Raises BusError."""
        query = "SELECT partition, next_offset FROM partitions WHERE topic = ? ORDER BY partition"
        with self.translate_errors("reading"):
            offsets = dict(self.connection.execute(query, (self.name,)))
        if not offsets or not all(isinstance(number, int) for number in (*offsets, *offsets.values())):
            raise BusError(f"{self.path} is damaged: its table of partitions says {offsets} of {self.name}; restore it")
        return offsets

    def first_offset(self, partition: int, default: int) -> int:
        """Return the offset of the oldest message, `default` when there is none."""
        query = "SELECT MIN(offset) FROM messages WHERE topic = ? AND partition = ? AND typeof(offset) = 'integer'"
        with self.translate_errors("reading"):
            first = self.connection.execute(query, (self.name, partition)).fetchone()[0]
        return default if first is None else first

    def identity(self) -> str:
        """Return the identity of this topic in this file. Raises BusError."""
        with self.translate_errors("reading"):
            row = self.connection.execute("SELECT id FROM topics WHERE topic = ?", (self.name,)).fetchone()
        if row is None:
            raise BusError(f"{self.path} is damaged: it has no identity of {self.name}; restore it")
        return str(row[0])

    def out_of_range(self, partition: int, offset: int, first: int | None, end: int | None) -> OffsetOutOfRange:
        """Return the error for an offset outside the log."""
        available = f"it holds {first} to {end}"
        return OffsetOutOfRange(f"{self.name}[{partition}]: offset {offset} lies outside the log, {available}")

    def close(self) -> None:
        with self.translate_errors("closing"):
            self.connection.close()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        create(self.path, PRIVATE)  # SQLite gives -wal and -shm the mode of the file
        file = _file_identity(self.path)
        self.connection = sqlite3.connect(self.path, self._timeout_s, isolation_level=None, check_same_thread=False)
        self._enter_wal()
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("PRAGMA secure_delete=ON")
        with self._transaction():
            self._create()
        self.partitions = tuple(self.next_offsets())
        self._file = file

    def _enter_wal(self) -> None:
        """Switch to WAL. When two processes switch at once, SQLite refuses one without waiting, so it tries again."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self.connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _create(self) -> None:
        for statement in _SCHEMA:
            self.connection.execute(statement)
        if self.connection.execute("SELECT 1 FROM partitions WHERE topic = ?", (self.name,)).fetchone():
            return
        rows = [(self.name, partition) for partition in range(self._num_partitions)]
        self.connection.executemany("INSERT INTO partitions VALUES (?, ?, 0)", rows)
        identity = (self.name, uuid.uuid4().hex)
        self.connection.execute("INSERT OR REPLACE INTO topics (topic, id) VALUES (?, ?)", identity)


def describe(path: Path, timeout_s: float = 10.0) -> dict[str, TopicFacts]:
    """Describe every topic of this log without changing it. Raises BusError when the file is missing or is no log."""
    if not path.exists():
        raise BusError(f"there is no log at {path}: whatever first writes or reads there makes it")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout_s, uri=True)) as connection:
            rows = connection.execute("SELECT topic, COUNT(*) FROM partitions GROUP BY topic").fetchall()
    except sqlite3.Error as exc:
        raise BusError(f"{path} is no log, or a damaged one ({exc}); give the log another file") from exc
    return {topic: TopicFacts(num_partitions) for topic, num_partitions in rows}


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file, None when there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
