"""Names and contents of files that survive a power failure, and that nobody else prepared.

A rename is atomic for readers, but after a power failure a disk may have the new name without its content. So the order
is: sync every file, then the folders from the innermost outwards, rename, sync the folder of the rename.
"""

import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from omnidraft.private_files import USUAL

LEFTOVER_S = 3600.0
"""The age from which on no writer is at work on a partial file any more."""
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial")
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that cannot sync folders."""


@contextmanager
def replaced_file(path: Path, rights: int = USUAL) -> Iterator[BinaryIO]:
    """Yield a new file to write, by its `name` too; at the end it is synced and takes the path. On any error nothing of
    it stays. `rights`: permissions before the umask is applied."""
    with written_aside(path, rights) as file:
        yield file
        file.flush()
        sync(Path(file.name))
    sync(path.parent)


@contextmanager
def written_aside(path: Path, rights: int = USUAL) -> Iterator[BinaryIO]:
    """Do the same without syncing. The name aside is random and new, so that nobody can have put a link there, or a
    file that others may read; what killed writers left in the folder is deleted."""
    _delete_leftovers(path.parent)
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")  # process ids of containers that share a folder are equal
    with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, rights)) as file:
        try:
            yield file
            file.flush()
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def _delete_leftovers(folder: Path) -> None:
    with os.scandir(folder) as entries:
        paths = [folder / entry.name for entry in entries if _PARTIAL.fullmatch(entry.name)]
    for path in paths:
        if _is_leftover(path):
            with suppress(FileNotFoundError):  # another writer deletes it too
                path.unlink()


def _is_leftover(path: Path) -> bool:
    """Return whether this is an old file of our own."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and time.time() - status.st_mtime > LEFTOVER_S


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
