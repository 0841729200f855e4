"""Which messages of an SQLite log are old enough to be deleted, by clocks that may be wrong.

A message's time is its writer's clock. Messages lie in the order of their writing, so one that claims to be of the
future is as old as the next one that does not, at least. Where the clock says that everything is older than it is
kept, either nobody wrote for long or the clock ran ahead: then nothing is deleted until it has said so for a while.
"""

import time

from omnidraft.bus.sqlite_topic import SqliteTopic

MAX_EXPIRED = 256
"""Messages of a partition that one append deletes; more than the recorder appends at once, so that old ones dwindle."""
MAX_HOLD_MS = 3_600_000
"""How long a clock is not believed that would delete everything; the time that messages are kept, if that is less."""
SKEW_MS = 2_000
"""A clock may be so much ahead of another."""

_TIME = "CAST(timestamp_ms AS INTEGER)"


def expire(topic: SqliteTopic, keep_ms: int) -> None:
    """Delete the oldest messages of every partition, MOST_EXPIRED at most. Inside a transaction."""
    now_ms = time.time_ns() // 1_000_000
    if _is_held(topic, now_ms, keep_ms):
        return
    for partition in topic.partitions:
        place = (topic.name, partition)
        if (end := _expired_end(topic, place, now_ms, now_ms - keep_ms)) is not None:
            delete = "DELETE FROM messages WHERE topic = ? AND partition = ? AND offset < ?"
            topic.connection.execute(delete, (*place, end))


def _is_held(topic: SqliteTopic, now_ms: int, keep_ms: int) -> bool:
    """Whether the clock is not believed yet."""
    query = "SELECT CAST(held_from_ms AS INTEGER) FROM topics WHERE topic = ?"
    (held_from_ms,) = topic.connection.execute(query, (topic.name,)).fetchone() or (None,)
    if held_from_ms is not None and held_from_ms - SKEW_MS <= now_ms < held_from_ms + min(keep_ms, MAX_HOLD_MS):
        return True
    newest_ms = _newest_ms(topic)
    is_all_expired = newest_ms is not None and newest_ms < now_ms - keep_ms
    if held_from_ms is not None and not is_all_expired:
        _hold(topic, None)  # it was believed, or it went back and had been wrong
    if held_from_ms is None and is_all_expired:
        _hold(topic, now_ms)
        return True
    return False


def _hold(topic: SqliteTopic, from_ms: int | None) -> None:
    topic.connection.execute("UPDATE topics SET held_from_ms = ? WHERE topic = ?", (from_ms, topic.name))


def _newest_ms(topic: SqliteTopic) -> int | None:
    """None when there is no message."""
    query = f"SELECT {_TIME} FROM messages WHERE topic = ? AND partition = ? ORDER BY offset DESC LIMIT 1"
    found = [topic.connection.execute(query, (topic.name, each)).fetchone() for each in topic.partitions]
    return max((row[0] for row in found if row is not None), default=None)


def _expired_end(topic: SqliteTopic, place: tuple[str, int], now_ms: int, kept_from_ms: int) -> int | None:
    """One past the last message to delete; None: the oldest is kept."""
    query = (
        f"SELECT offset, {_TIME} FROM messages WHERE topic = ? AND partition = ? AND typeof(offset) = 'integer'"
        " ORDER BY offset LIMIT ?"
    )
    end, offset, claimed_ms = None, 0, 0
    for offset, claimed_ms in topic.connection.execute(query, (*place, MAX_EXPIRED)):
        if claimed_ms < kept_from_ms:
            end = offset + 1
        elif claimed_ms <= now_ms + SKEW_MS:
            return end
    if claimed_ms <= now_ms + SKEW_MS:
        return end
    later_ms = _next_plausible_ms(topic, place, offset, now_ms)
    return offset + 1 if later_ms is not None and later_ms < kept_from_ms else end


def _next_plausible_ms(topic: SqliteTopic, place: tuple[str, int], offset: int, now_ms: int) -> int | None:
    """The time of a message behind this one that is not of the future, looked for in strides that double and begin
    anew where they would leave the log; None: there is none."""
    query = (
        f"SELECT offset, {_TIME} FROM messages WHERE topic = ? AND partition = ? AND offset >= ?"
        " AND typeof(offset) = 'integer' ORDER BY offset LIMIT 1"
    )
    stride = 1
    while True:
        found = topic.connection.execute(query, (*place, offset + stride)).fetchone()
        if found is not None:
            offset, claimed_ms = found
            if claimed_ms <= now_ms + SKEW_MS:
                return int(claimed_ms)
            stride *= 2
        elif stride == 1:
            return None
        else:
            stride = 1
