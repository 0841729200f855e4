"""Delete expired messages of an SQLite log by clocks that may be wrong.

A message's time is its writer's clock. Messages are stored in the order of writing, so one with a time in the future is
at least as old as the next one without. Where the clock says that everything has expired, either nobody wrote for long
or the clock is ahead: then nothing is deleted for a while, which the machine's monotonic clock measures.
"""

import time

from omnidraft.bus.sqlite_topic import SqliteTopic

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
    later_ms = _next_plausible_ms(topic, log, offset, now_ms)
    return offset + 1 if later_ms is not None and later_ms < kept_from_ms else end


def _next_plausible_ms(topic: SqliteTopic, log: tuple[str, int], offset: int, now_ms: int) -> int | None:
    """Return the time of a later message that is not in the future, None when there is none. The search takes strides
    that double, and restarts with 1 where one would leave the log."""
    query = (
        f"SELECT offset, {_TIME} FROM messages WHERE topic = ? AND partition = ? AND offset >= ?"
        " AND typeof(offset) = 'integer' ORDER BY offset LIMIT 1"
    )
    stride = 1
    while True:
        row = topic.connection.execute(query, (*log, offset + stride)).fetchone()
        if row is not None:
            offset, timestamp_ms = row
            if timestamp_ms <= now_ms + SKEW_MS:
                return int(timestamp_ms)
            stride *= 2
        elif stride == 1:
            return None
        else:
            stride = 1
