"""Files that contain users' text: only their owner may read them, from their creation on, whatever the umask."""

import os
import stat
from pathlib import Path

PRIVATE, USUAL = 0o600, 0o666
"""Permissions before the umask is applied."""


def create(path: Path, rights: int) -> int:
    """Create an empty file unless the path exists, with these permissions; return the file's permissions."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, rights))
    return stat.S_IMODE(path.stat().st_mode)


def private_opener(path: str, flags: int) -> int:
    """Open a file that only its owner may read: `open(..., opener=private_opener)`."""
    return os.open(path, flags, PRIVATE)
