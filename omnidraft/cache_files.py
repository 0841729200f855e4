"""Small files of the user's cache, which no reader finds half written, and what tells that the files that they were
made of have changed."""

import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SUFFIX = ".replacement"
LEFTOVER_S = 3600.0
"""The age from which on no writer is at work on a file any more."""


def file_states(files: Iterable[Path]) -> list[list[str | int]]:
    """Return name, size and time of the last change of each file, as JSON holds them. Raises OSError."""
    states = [(file.name, file.stat()) for file in files]
    return [[name, status.st_size, status.st_mtime_ns] for name, status in states]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file aside, in its folder, which is made if it is missing, and rename it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete_leftovers(path.parent)
    partial = path.with_name(f".{uuid.uuid4().hex}{SUFFIX}")  # process ids of containers that share a home are equal
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _delete_leftovers(folder: Path) -> None:
    """Delete what killed writers left in this folder."""
    for leftover in folder.glob(f".*{SUFFIX}"):
        with suppress(OSError):  # another writer deletes it too
            if time.time() - leftover.stat().st_mtime > LEFTOVER_S:
                leftover.unlink()
