"""Files that contain users' text: only their owner may read them, from their creation on, whatever the umask."""

import os
import stat
from contextlib import suppress
from pathlib import Path

PRIVATE, USUAL = 0o600, 0o666
"""Permissions before the umask is applied."""


def create(path: Path, rights: int) -> int:
    """Create an empty file unless the path exists, with these permissions; return the file's permissions.

    A file that exists is not even opened: closing it would drop all locks that this process has on it, SQLite's too.
    """
    with suppress(FileExistsError):
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, rights))
    return stat.S_IMODE(path.stat().st_mode)


def private_opener(path: str, flags: int) -> int:
    """Open a file that only its owner may read: `open(..., opener=private_opener)`."""
    return os.open(path, flags, PRIVATE)
