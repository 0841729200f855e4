"""Files that hold users' text: only their owner may read them, from the moment they are there, whatever the umask."""

import os
import stat
from pathlib import Path

PRIVATE, USUAL = 0o600, 0o666
"""Rights before the umask takes some away."""


def create(path: Path, rights: int) -> int:
    """An empty file for somebody else to write into; a file that is there stays as it is. Returns its rights now."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, rights))
    return stat.S_IMODE(path.stat().st_mode)


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`."""
    return os.open(path, flags, PRIVATE)
