"""Delete the messages of an SQLite log that everybody who reads them has read."""

from pathlib import Path

from omnidraft.bus.sqlite_topic import SqliteTopic
from omnidraft.ports import Offsets


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
