"""A log in one SQLite file (WAL): several processes, several topics, nothing to install.

An append is one transaction and on disk when it returns. Offsets of a partition are gapless: they are given out
inside that transaction, under SQLite's single write lock, and never twice. A writer that was told how long messages are
kept deletes older ones, some at a time, in the transaction of each append; their bytes are overwritten.
"""

import json
import math
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from omnidraft.errors import BusError
from omnidraft.ports import Message, Offsets, Outgoing, Polled, TopicFacts
from omnidraft.private_files import PRIVATE, create

POLL_INTERVAL_S = 0.05
MOST_EXPIRED = 256
"""Messages of a partition that one append deletes; more than the recorder appends at once, so that old ones dwindle."""
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS partitions (topic TEXT, partition INTEGER, next_offset INTEGER NOT NULL,"
    " PRIMARY KEY (topic, partition))",
    "CREATE TABLE IF NOT EXISTS messages (topic TEXT, partition INTEGER, offset INTEGER, key BLOB NOT NULL,"
    " value BLOB NOT NULL, headers TEXT NOT NULL, timestamp_ms INTEGER NOT NULL,"
    " PRIMARY KEY (topic, partition, offset))",
)


class _Topic:
    """A connection and one topic in it; created with `partitions` partitions when missing."""

    def __init__(self, path: Path, topic: str, partitions: int, timeout_s: float) -> None:
        self.path, self.name, self._timeout_s = path, topic, timeout_s
        with self.translated("opening"):
            path.parent.mkdir(parents=True, exist_ok=True)
            create(path, PRIVATE)  # SQLite gives -wal and -shm the rights of the file
            self.connection = sqlite3.connect(path, timeout_s, isolation_level=None, check_same_thread=False)
            self._enter_wal()
            self.connection.execute("PRAGMA synchronous=FULL")
            self._create(partitions)
        self.partitions = tuple(self.next_offsets())

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Turns what SQLite and the file system raise into BusError."""
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            raise BusError(f"{doing} {self.name} in {self.path}: {exc}") from exc

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """One transaction, all of it or nothing."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def next_offsets(self) -> dict[int, int]:
        """One past the last message of every partition."""
        query = "SELECT partition, next_offset FROM partitions WHERE topic = ? ORDER BY partition"
        with self.translated("reading"):
            return dict(self.connection.execute(query, (self.name,)))

    def first_offset(self, partition: int, default: int) -> int:
        """Of the oldest message that is still there; `default` when there is none."""
        query = "SELECT MIN(offset) FROM messages WHERE topic = ? AND partition = ?"
        with self.translated("reading"):
            found = self.connection.execute(query, (self.name, partition)).fetchone()[0]
        return default if found is None else found

    def close(self) -> None:
        with self.translated("closing"):
            self.connection.close()

    def _enter_wal(self) -> None:
        """Two processes that switch at once: SQLite refuses one of them without waiting, so ask again."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self.connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _create(self, partitions: int) -> None:
        with self.write_lock():
            for statement in _SCHEMA:
                self.connection.execute(statement)
            exists = self.connection.execute("SELECT 1 FROM partitions WHERE topic = ?", (self.name,)).fetchone()
            if not exists:
                rows = [(self.name, partition) for partition in range(partitions)]
                self.connection.executemany("INSERT INTO partitions VALUES (?, ?, 0)", rows)


def describe(path: Path, timeout_s: float = 10.0) -> dict[str, TopicFacts]:
    """Every topic of this log, which is not changed. Raises BusError when there is no such file, or it is no log."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout_s, uri=True)) as connection:
            found = connection.execute("SELECT topic, COUNT(*) FROM partitions GROUP BY topic").fetchall()
    except sqlite3.Error as exc:
        advice = "whatever first writes or reads there makes it" if not path.exists() else "give the log another file"
        raise BusError(f"reading the log {path}: {exc}; {advice}") from exc
    return {topic: TopicFacts(num_partitions) for topic, num_partitions in found}


class SqliteWriter:
    """LogWriter of one topic."""

    def __init__(
        self,
        path: Path,
        topic: str,
        *,
        partitions: int = 1,
        timeout_s: float = 10.0,
        keep_s: float | None = None,
    ) -> None:
        """`keep_s`: seconds that messages are kept; None or inf: for ever."""
        self._topic = _Topic(path, topic, partitions, timeout_s)
        self._keep_ms = None if keep_s is None or math.isinf(keep_s) else int(keep_s * 1000)
        if self._keep_ms is not None:
            with self._topic.translated("opening"):
                self._topic.connection.execute("PRAGMA secure_delete=ON")
            self.append(())  # lets go of what expired since the last writer

    def append(self, messages: Sequence[Outgoing]) -> None:
        with self._topic.translated("appending to"), self._topic.write_lock():
            self._expire()
            next_offsets = self._topic.next_offsets()
            self._insert(messages, next_offsets)
            rows = [(offset, self._topic.name, partition) for partition, offset in next_offsets.items()]
            update = "UPDATE partitions SET next_offset = ? WHERE topic = ? AND partition = ?"
            self._topic.connection.executemany(update, rows)

    def close(self) -> None:
        self._topic.close()

    def _expire(self) -> None:
        """Delete the oldest messages of every partition up to the first that is kept, or MOST_EXPIRED of them."""
        if self._keep_ms is None:
            return
        kept_from_ms = time.time_ns() // 1_000_000 - self._keep_ms
        for partition in self._topic.partitions:
            place = (self._topic.name, partition)
            if (end := self._expired_end(place, kept_from_ms)) is not None:
                delete = "DELETE FROM messages WHERE topic = ? AND partition = ? AND offset < ?"
                self._topic.connection.execute(delete, (*place, end))

    def _expired_end(self, place: tuple[str, int], kept_from_ms: int) -> int | None:
        """One past the last message to delete; None: the oldest is kept."""
        query = "SELECT offset, timestamp_ms FROM messages WHERE topic = ? AND partition = ? ORDER BY offset LIMIT ?"
        end = None
        for offset, timestamp_ms in self._topic.connection.execute(query, (*place, MOST_EXPIRED)):
            if timestamp_ms >= kept_from_ms:
                break
            end = offset + 1
        return end

    def _insert(self, messages: Sequence[Outgoing], next_offsets: dict[int, int]) -> None:
        now_ms = time.time_ns() // 1_000_000
        rows = []
        for message in messages:
            partition = zlib.crc32(message.key) % len(next_offsets)
            if message.partition is not None:
                partition = message.partition
            place = (self._topic.name, partition, next_offsets[partition])
            rows.append((*place, message.key, message.value, _headers_text(message.headers), now_ms))
            next_offsets[partition] += 1
        self._topic.connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


class SqliteReader:
    """LogReader of one topic."""

    def __init__(self, path: Path, topic: str, *, partitions: int = 1, timeout_s: float = 10.0) -> None:
        self._topic = _Topic(path, topic, partitions, timeout_s)
        self._positions: dict[int, int] = {}
        self._turn = 0
        self.seek({})

    def partitions(self) -> tuple[int, ...]:
        return self._topic.partitions

    def seek(self, offsets: Offsets) -> None:
        ends = self.end_offsets()
        firsts = self._first_offsets(ends)
        for partition, offset in offsets.items():
            if partition not in ends or not firsts[partition] <= offset <= ends[partition]:
                raise _outside(self._topic, partition, offset, firsts.get(partition), ends.get(partition))
        self._positions = firsts | dict(offsets)

    def seek_back(self, num_messages: int) -> None:
        ends = self.end_offsets()
        firsts = self._first_offsets(ends)
        self._positions = {partition: max(firsts[partition], end - num_messages) for partition, end in ends.items()}

    def poll(self, max_messages: int, timeout_s: float) -> Polled:
        deadline = time.monotonic() + timeout_s
        messages = self._read(max_messages)
        while not messages and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_INTERVAL_S, left_s))
            messages = self._read(max_messages)
        next_offsets = {message.partition: message.offset + 1 for message in messages}
        self._positions |= next_offsets
        return Polled(tuple(messages), next_offsets)

    def end_offsets(self) -> Offsets:
        return self._topic.next_offsets()

    def close(self) -> None:
        self._topic.close()

    def _first_offsets(self, ends: Offsets) -> dict[int, int]:
        return {partition: self._topic.first_offset(partition, end) for partition, end in ends.items()}

    def _read(self, max_messages: int) -> list[Message]:
        """Up to `max_messages`; another partition comes first each time, so that none is starved."""
        self._turn += 1
        start = self._turn % len(self._topic.partitions)
        messages: list[Message] = []
        for partition in self._topic.partitions[start:] + self._topic.partitions[:start]:
            messages += self._read_partition(partition, max_messages - len(messages))
        return messages

    def _require_held(self, partition: int, position: int) -> None:
        """Raises BusError when what comes next was deleted, instead of passing over it."""
        end = self.end_offsets()[partition]
        first = self._topic.first_offset(partition, end)  # asked after the end: what was written meanwhile is held
        if first > position:
            raise _outside(self._topic, partition, position, first, end)

    def _read_partition(self, partition: int, limit: int) -> list[Message]:
        query = (
            "SELECT offset, key, value, headers, timestamp_ms FROM messages"
            " WHERE topic = ? AND partition = ? AND offset >= ? ORDER BY offset LIMIT ?"
        )
        position = self._positions[partition]
        place = (self._topic.name, partition, position, limit)
        with self._topic.translated("reading"):
            rows = self._topic.connection.execute(query, place).fetchall()
        if limit and (not rows or rows[0][0] > position):
            self._require_held(partition, position)
        return [
            Message(partition, offset, key, value, _headers(text), timestamp_ms)
            for offset, key, value, text, timestamp_ms in rows
        ]


def _outside(topic: _Topic, partition: int, offset: int, first: int | None, end: int | None) -> BusError:
    held = f"it holds {first} to {end}"
    return BusError(f"{topic.name}[{partition}]: offset {offset} lies outside the log, {held}")


def _headers_text(headers: Mapping[str, bytes]) -> str:
    return json.dumps({name: value.decode("latin-1") for name, value in headers.items()})


def _headers(text: str) -> dict[str, bytes]:
    return {name: value.encode("latin-1") for name, value in json.loads(text).items()}
