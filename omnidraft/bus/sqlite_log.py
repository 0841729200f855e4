"""A log in one SQLite file (WAL): several processes, several topics, nothing to install.

An append is one transaction and on disk when it returns. Offsets of a partition are gapless: they are assigned inside
that transaction, under SQLite's single write lock, and never twice. A writer with a retention deletes expired messages,
some at a time, in the transaction of each append; their bytes are overwritten. A compacted topic keeps the newest
message of each key.
Cells that were not written by us are read as their bytes; the decoder of messages judges them.

Expiry goes by clocks that may be wrong. A message's time is its writer's clock. Messages are stored in the order of
writing, so one with a time in the future is at least as old as the next one without. Where the clock says that
everything has expired, either nobody wrote for long or the clock is ahead: then nothing is deleted for a while, which
the machine's monotonic clock measures.
"""

import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from omnidraft.bus.sqlite_topic import SqliteTopic
from omnidraft.errors import OffsetOutOfRange
from omnidraft.ports import COMPACTION_LAG_S, Message, Offsets, Outgoing, PollResult

POLL_INTERVAL_S = 0.05
MALFORMED = "malformed_headers"
"""The only header of a message whose headers cannot be read; it holds the beginning of that cell."""
_MALFORMED_BYTES = 256


class SqliteWriter:
    """Implements ports.LogWriter for one topic."""

    def __init__(
        self,
        path: Path,
        topic: str,
        *,
        partitions: int = 1,
        timeout_s: float = 10.0,
        keep_s: float | None = None,
        is_compacted: bool = False,
    ) -> None:
        """
        Args:
            keep_s: the retention in seconds; None or inf: unlimited.
            is_compacted: delete the messages of a key that a newer one has replaced for COMPACTION_LAG_S.
        """
        self._topic = SqliteTopic(path, topic, partitions, timeout_s)
        self._is_compacted = is_compacted
        self._keep_ms = None if keep_s is None or math.isinf(keep_s) else int(keep_s * 1000)
        if self._keep_ms is not None:
            self.append(())  # deletes what expired since the last writer

    def append(self, messages: Sequence[Outgoing]) -> None:
        with self._topic.translate_errors("appending to"), self._topic.write_lock():
            if self._keep_ms is not None:
                expire(self._topic, self._keep_ms)
            next_offsets = self._topic.next_offsets()
            self._insert(messages, next_offsets)
            for message in messages if self._is_compacted else ():
                _compact(self._topic, message.key)
            rows = [(offset, self._topic.name, partition) for partition, offset in next_offsets.items()]
            update = "UPDATE partitions SET next_offset = ? WHERE topic = ? AND partition = ?"
            self._topic.connection.executemany(update, rows)

    def close(self) -> None:
        self._topic.close()

    def _insert(self, messages: Sequence[Outgoing], next_offsets: dict[int, int]) -> None:
        now_ms = time.time_ns() // 1_000_000
        rows = []
        for message in messages:
            partition = zlib.crc32(message.key) % len(next_offsets)
            if message.partition is not None:
                partition = message.partition
            key = (self._topic.name, partition, next_offsets[partition])
            rows.append((*key, message.key, message.value, _headers_text(message.headers), now_ms))
            next_offsets[partition] += 1
        self._topic.connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


class SqliteReader:
    """Implements ports.LogReader for one topic."""

    def __init__(self, path: Path, topic: str, *, partitions: int = 1, timeout_s: float = 10.0) -> None:
        self._topic = SqliteTopic(path, topic, partitions, timeout_s)
        self._positions: dict[int, int] = {}
        self._turn = 0
        self.seek({})

    def partitions(self) -> tuple[int, ...]:
        return self._topic.partitions

    def seek(self, offsets: Offsets) -> None:
        self._follow_file()
        ends, firsts = self.end_offsets(), self.first_offsets()
        for partition, offset in offsets.items():
            if partition not in ends or not firsts[partition] <= offset <= ends[partition]:
                raise self._topic.out_of_range(partition, offset, firsts.get(partition), ends.get(partition))
        self._positions = {**firsts, **offsets}
        self._topic.was_replaced = False

    def seek_back(self, num_messages: int) -> None:
        self._follow_file()
        ends, firsts = self.end_offsets(), self.first_offsets()
        self._topic.was_replaced = False
        self._positions = {partition: max(firsts[partition], end - num_messages) for partition, end in ends.items()}

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        deadline = time.monotonic() + timeout_s
        messages = self._read(max_messages)
        while not messages and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_INTERVAL_S, left_s))
            messages = self._read(max_messages)
        next_offsets = {message.partition: message.offset + 1 for message in messages}
        self._positions |= next_offsets
        return PollResult(tuple(messages), next_offsets)

    def first_offsets(self) -> Offsets:
        ends = self.end_offsets()
        return {partition: self._topic.first_offset(partition, end) for partition, end in ends.items()}

    def end_offsets(self) -> Offsets:
        return self._topic.next_offsets()

    def identity(self) -> str:
        self._follow_file()
        return self._topic.identity()

    def close(self) -> None:
        self._topic.close()

    def _follow_file(self) -> None:
        with self._topic.translate_errors("opening"):
            self._topic.follow_file()

    def _read(self, max_messages: int) -> list[Message]:
        """Return up to `max_messages`; another partition comes first each time, so that none is starved."""
        self._follow_file()
        if self._topic.was_replaced:
            raise OffsetOutOfRange(f"{self._topic.path} was replaced while it was read")
        self._turn += 1
        start = self._turn % len(self._topic.partitions)
        messages: list[Message] = []
        for partition in self._topic.partitions[start:] + self._topic.partitions[:start]:
            messages += self._read_partition(partition, max_messages - len(messages))
        return messages

    def _require_available(self, partition: int, position: int) -> None:
        """Raise OffsetOutOfRange when the next message is missing, instead of skipping it."""
        end = self.end_offsets().get(partition, 0)
        first = self._topic.first_offset(partition, end)  # read after the end, so what was written meanwhile counts
        if not first <= position <= end:
            raise self._topic.out_of_range(partition, position, first, end)

    def _read_partition(self, partition: int, limit: int) -> list[Message]:
        query = (
            "SELECT offset, CAST(key AS BLOB), CAST(value AS BLOB), CAST(headers AS BLOB),"
            " CAST(timestamp_ms AS INTEGER) FROM messages"
            " WHERE topic = ? AND partition = ? AND offset >= ? AND typeof(offset) = 'integer' ORDER BY offset LIMIT ?"
        )
        position = self._positions[partition]
        arguments = (self._topic.name, partition, position, limit)
        with self._topic.translate_errors("reading"):
            rows = self._topic.connection.execute(query, arguments).fetchall()
        if limit and (not rows or rows[0][0] > position):
            self._require_available(partition, position)
        return [
            Message(partition, offset, key or b"", value or b"", _headers(cell or b""), timestamp_ms or 0)
            for offset, key, value, cell, timestamp_ms in rows
        ]


def _headers_text(headers: Mapping[str, bytes]) -> str:
    return json.dumps({name: value.decode("latin-1") for name, value in headers.items()})


def _headers(cell: bytes) -> dict[str, bytes]:
    try:
        return {name: value.encode("latin-1") for name, value in json.loads(cell).items()}
    except (ValueError, AttributeError, RecursionError):  # no JSON, no object, or a value that is not latin-1 text
        return {MALFORMED: cell[:_MALFORMED_BYTES]}


def _compact(topic: SqliteTopic, key: bytes) -> None:
    """Delete the messages of this key that were replaced COMPACTION_LAG_S ago. Call inside a transaction."""
    replaced_ms = time.time_ns() // 1_000_000 - int(COMPACTION_LAG_S * 1000)
    topic.connection.execute(
        "DELETE FROM messages WHERE topic = ?1 AND key = ?2 AND EXISTS (SELECT 1 FROM messages AS newer"
        " WHERE newer.topic = ?1 AND newer.partition = messages.partition AND newer.key = ?2"
        " AND newer.offset > messages.offset AND newer.timestamp_ms <= ?3)",
        (topic.name, key, replaced_ms),
    )


MAX_EXPIRED = 256
"""Messages of a partition that one append deletes at most; more than the producer appends at once, so that expired
messages become fewer."""
MAX_HOLD_MS = 3_600_000
"""Time for which a clock is not trusted that would delete everything; the retention, if that is shorter."""
SKEW_MS = 2_000
"""Tolerated difference between two clocks."""

_TIME = "CAST(timestamp_ms AS INTEGER)"


def expire(topic: SqliteTopic, keep_ms: int) -> None:
    """Delete the oldest expired messages of every partition, at most MAX_EXPIRED each. Call inside a transaction."""
    now_ms = time.time_ns() // 1_000_000
    if _is_held(topic, now_ms, keep_ms):
        return
    for partition in topic.partitions:
        log = (topic.name, partition)
        if (end := _expired_end(topic, log, now_ms, now_ms - keep_ms)) is not None:
            delete = "DELETE FROM messages WHERE topic = ? AND partition = ? AND offset < ?"
            topic.connection.execute(delete, (*log, end))


def _is_held(topic: SqliteTopic, now_ms: int, keep_ms: int) -> bool:
    """Return whether the clock is not trusted yet."""
    query = "SELECT CAST(held_from_ms AS INTEGER) FROM topics WHERE topic = ?"
    (held_from_ms,) = topic.connection.execute(query, (topic.name,)).fetchone() or (None,)
    monotonic_ms = time.monotonic_ns() // 1_000_000
    if held_from_ms is not None and monotonic_ms - held_from_ms < min(keep_ms, MAX_HOLD_MS):
        if monotonic_ms < held_from_ms:  # the machine was restarted
            _hold(topic, monotonic_ms)
        return True
    newest_ms = _newest_ms(topic)
    is_all_expired = newest_ms is not None and newest_ms < now_ms - keep_ms
    if held_from_ms is not None and not is_all_expired:
        _hold(topic, None)
    if held_from_ms is None and is_all_expired:
        _hold(topic, monotonic_ms)
        return True
    return False


def _hold(topic: SqliteTopic, from_ms: int | None) -> None:
    topic.connection.execute("UPDATE topics SET held_from_ms = ? WHERE topic = ?", (from_ms, topic.name))


def _newest_ms(topic: SqliteTopic) -> int | None:
    """Return the time of the newest message, None when there is none."""
    query = f"SELECT {_TIME} FROM messages WHERE topic = ? AND partition = ? ORDER BY offset DESC LIMIT 1"
    rows = [topic.connection.execute(query, (topic.name, each)).fetchone() for each in topic.partitions]
    return max((row[0] for row in rows if row is not None), default=None)


def _expired_end(topic: SqliteTopic, log: tuple[str, int], now_ms: int, kept_from_ms: int) -> int | None:
    """Return the offset after the last message to delete, None when even the oldest stays."""
    query = (
        f"SELECT offset, {_TIME} FROM messages WHERE topic = ? AND partition = ? AND typeof(offset) = 'integer'"
        " ORDER BY offset LIMIT ?"
    )
    end, offset, timestamp_ms = None, 0, 0
    for offset, timestamp_ms in topic.connection.execute(query, (*log, MAX_EXPIRED)):
        if timestamp_ms < kept_from_ms:
            end = offset + 1
        elif timestamp_ms <= now_ms + SKEW_MS:
            return end
    if timestamp_ms <= now_ms + SKEW_MS:
        return end
    later = (
        f"SELECT {_TIME} FROM messages WHERE topic = ? AND partition = ? AND offset > ? AND {_TIME} <= ?"
        " AND typeof(offset) = 'integer' ORDER BY offset LIMIT 1"
    )
    plausible = topic.connection.execute(later, (*log, offset, now_ms + SKEW_MS)).fetchone()
    return offset + 1 if plausible is not None and plausible[0] < kept_from_ms else end


def delete_before(path: Path, topic: str, offsets: Offsets, timeout_s: float = 10.0) -> None:
    """Delete the messages before these offsets, in one transaction; their bytes are overwritten, and the file uses
    their space again. Raises BusError."""
    log = SqliteTopic(path, topic, 1, timeout_s)
    try:
        with log.translate_errors("deleting from"), log.write_lock():
            for partition, offset in offsets.items():
                delete = "DELETE FROM messages WHERE topic = ? AND partition = ? AND offset < ?"
                log.connection.execute(delete, (topic, partition, offset))
    finally:
        log.close()
