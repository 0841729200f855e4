"""Messages whose content is deleted from an SQLite log: its files keep no byte of it, and every offset a message."""

import subprocess
import sys
from pathlib import Path

from omnidraft.bus.sqlite_forget import forget_messages, shrink
from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.ports import Outgoing

TOPIC = "traces"
SECRET, KEPT = b"what the leaver wrote ", b"what the stayer wrote "


def fill(path: Path, num: int = 40) -> None:
    """Every other message is secret, some of them longer than a page."""
    writer = SqliteWriter(path, TOPIC, partitions=2)
    for offset in range(num):
        text = (SECRET if offset % 2 else KEPT) * (1 if offset % 3 else 500)
        headers = {"schema": b"s", "target": b"big", "quoted": text[:40], "encryption_key_id": b"id"}
        writer.append([Outgoing(b"key " + text[:22], text, headers, partition=0)])
    writer.close()


def holding(folder: Path, needle: bytes) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if needle in path.read_bytes())


def secret_positions(num: int = 40) -> list[tuple[int, int]]:
    return [(0, offset) for offset in range(num) if offset % 2]


def test_no_file_of_the_log_holds_it_and_every_offset_has_a_message(tmp_path: Path) -> None:
    fill(tmp_path / "log.db")
    open_meanwhile = SqliteReader(tmp_path / "log.db", TOPIC, partitions=2)
    assert holding(tmp_path, SECRET)
    forget_messages(tmp_path / "log.db", TOPIC, secret_positions(), b"mark")
    shrink(tmp_path / "log.db", TOPIC)
    assert holding(tmp_path, SECRET) == []
    messages = open_meanwhile.poll(100, 1.0).messages
    assert [message.offset for message in messages] == list(range(40))
    for message in messages:
        if message.offset % 2:
            kept = {"schema": b"s", "target": b"big", "encryption_key_id": b"id", "forgotten": b"mark"}
            assert (message.key, message.value, message.headers) == (b"", b"", kept)
        else:
            assert message.value.startswith(KEPT)


def test_deleting_again_and_what_has_expired_do_no_harm(tmp_path: Path) -> None:
    fill(tmp_path / "log.db", 6)
    for _ in range(2):
        forget_messages(tmp_path / "log.db", TOPIC, [*secret_positions(6), (0, 999), (1, 0)], b"mark")
        shrink(tmp_path / "log.db", TOPIC)
    reader = SqliteReader(tmp_path / "log.db", TOPIC, partitions=2)
    assert [bool(message.value) for message in reader.poll(100, 1.0).messages] == [True, False] * 3


def test_a_writer_goes_on_at_the_next_offset(tmp_path: Path) -> None:
    fill(tmp_path / "log.db", 4)
    writer = SqliteWriter(tmp_path / "log.db", TOPIC, partitions=2)
    forget_messages(tmp_path / "log.db", TOPIC, secret_positions(4), b"mark")
    shrink(tmp_path / "log.db", TOPIC)
    writer.append([Outgoing(b"k", b"next", {}, partition=0)])
    reader = SqliteReader(tmp_path / "log.db", TOPIC, partitions=2)
    assert [(each.offset, each.value) for each in reader.poll(100, 1.0).messages][-1] == (4, b"next")


def test_a_process_that_was_killed_in_between_leaves_a_log_that_can_be_finished(tmp_path: Path) -> None:
    fill(tmp_path / "log.db")
    code = (
        "import os, signal, sys; from pathlib import Path; from omnidraft.bus import sqlite_forget\n"
        "empty, done = sqlite_forget._empty, []\n"
        "def dying(*args):\n"
        "    done.append(empty(*args))\n"
        "    if len(done) == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sqlite_forget._empty, sqlite_forget.BATCH_MESSAGES = dying, 5\n"
        "sqlite_forget.forget_messages(Path(sys.argv[1]), 'traces', [(0, n) for n in range(1, 40, 2)], b'mark')\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "log.db"], check=False, timeout=60)
    assert killed.returncode == -9
    reader = SqliteReader(tmp_path / "log.db", TOPIC, partitions=2)
    assert sum(not message.value for message in reader.poll(100, 1.0).messages) == 5  # the batch that was whole
    forget_messages(tmp_path / "log.db", TOPIC, secret_positions(), b"mark")
    shrink(tmp_path / "log.db", TOPIC)
    assert holding(tmp_path, SECRET) == []
