"""Names and contents of files that survive a power failure.

A rename is atomic for readers, but after a power failure a disk may have the new name without its content. So the order
is: sync every file, then the folders from the innermost outwards, rename, sync the folder of the rename.
"""

import errno
import os
from pathlib import Path

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that cannot sync folders."""


def sync(path: Path) -> None:
    """Wait until the content of this file, or the names in this folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a file or folder that is already synced; a file may be replaced."""
    os.replace(partial, final)
    sync(final.parent)
