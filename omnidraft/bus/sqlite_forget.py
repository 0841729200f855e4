"""Delete the content of messages in an SQLite log for real: no file of the log holds it when this returns.

Their rows stay, so that every offset has a message. What is left of one are the plain headers that say which pair and
key it was for, and the header `forgotten`.
"""

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from omnidraft.bus.sqlite_topic import SqliteTopic
from omnidraft.errors import BusError
from omnidraft.traces.schema import FORGOTTEN, KEY_ID

KEPT_HEADERS = (
    *("schema", "schema_version", "target", "alignment", KEY_ID),
    *("reason", "origin_topic", "origin_partition", "origin_offset", "origin_num_messages"),
)
BATCH_MESSAGES = 500
CHECKPOINT_S = 30.0
"""Seconds to wait for readers, whose transactions keep the write-ahead log alive."""


def forget_messages(
    path: Path, topic: str, positions: Collection[tuple[int, int]], mark: bytes, timeout_s: float = 10.0
) -> None:
    """Delete the content of the messages at these positions, (partition, offset), in transactions of BATCH_MESSAGES.

    Args:
        mark: the value of the header `forgotten`.

    Raises:
        BusError: the log cannot be written; what was deleted stays so, and the caller may repeat it.
    """
    ordered = sorted(positions)
    with _opened(path, topic, timeout_s) as log:
        for start in range(0, len(ordered), BATCH_MESSAGES):
            with log.translate_errors("deleting from"), log.write_lock():
                for partition, offset in ordered[start : start + BATCH_MESSAGES]:
                    _empty(log, partition, offset, mark)


def shrink(path: Path, topic: str, timeout_s: float = 10.0) -> None:
    """Write the file of a log anew without its free pages, and empty its write-ahead log. Raises BusError."""
    with _opened(path, topic, timeout_s) as log, log.translate_errors("vacuuming"):
        _checkpoint(log)
        log.connection.execute("VACUUM")
        _checkpoint(log)


@contextmanager
def _opened(path: Path, topic: str, timeout_s: float) -> Iterator[SqliteTopic]:
    log = SqliteTopic(path, topic, 1, timeout_s)
    try:
        yield log
    finally:
        log.close()


def _empty(log: SqliteTopic, partition: int, offset: int, mark: bytes) -> None:
    position = (log.name, partition, offset)
    where = "WHERE topic = ? AND partition = ? AND offset = ?"
    row = log.connection.execute(f"SELECT CAST(headers AS BLOB) FROM messages {where}", position).fetchone()
    if row is None:
        return  # it has expired
    headers = json.dumps({**_kept(row[0]), FORGOTTEN: mark.decode("latin-1")})
    update = f"UPDATE messages SET key = x'', value = x'', headers = ? {where}"
    log.connection.execute(update, (headers, *position))


def _kept(cell: bytes) -> dict[str, str]:
    try:
        headers = json.loads(cell or b"{}")
        return {name: str(headers[name]) for name in KEPT_HEADERS if name in headers}
    except (ValueError, TypeError, RecursionError):
        return {}


def _checkpoint(log: SqliteTopic) -> None:
    """Move the write-ahead log into the file and empty it. Raises BusError when readers keep it busy."""
    deadline_s = time.monotonic() + CHECKPOINT_S
    while log.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        if time.monotonic() > deadline_s:
            raise BusError(f"{log.path}: another process has been reading it for {CHECKPOINT_S:.0f} s; try again")
        time.sleep(0.1)
