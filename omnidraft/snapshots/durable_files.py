"""Files that are there after the machine lost power: what they hold first, then the names that lead to them.

A rename is atomic for whoever looks, but a disk may keep the new name and lose what it names. So: every file, the
folders from the innermost outwards, the rename, the folder in which it happened.
"""

import errno
import os
from pathlib import Path

from omnidraft.private_files import USUAL, create

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""What file systems answer that cannot do it for folders."""


def sync(path: Path) -> None:
    """Returns when what this file holds, or the names in this folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """The same for everything below, and the folder itself."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def make_folder(folder: Path) -> None:
    """With the folders above it, where they are missing."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a file or folder that is on the disk already; a file may be there in its place."""
    os.replace(partial, final)
    sync(final.parent)


def write_text(path: Path, text: str, rights: int = USUAL) -> None:
    """The file holds all of this or what it held before. `rights`: see private_files."""
    partial = path.with_name(f".{path.name}.partial")
    create(partial, rights)
    partial.write_text(text)
    sync(partial)
    put_in_place(partial, path)
