"""Files that hold users' text: only their owner may read them, from the moment they are there, whatever the umask."""

import os
from pathlib import Path

PRIVATE = 0o600


def create_private(path: Path) -> None:
    """An empty file for somebody else to write into; a file that is there stays as it is."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, PRIVATE))


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`."""
    return os.open(path, flags, PRIVATE)
