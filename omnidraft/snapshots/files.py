"""Files that are written once, checked by their sum, shared without copying, and there after the machine lost power.

A hard link costs no space and no time, and is safe because a snapshot's files are never written to again.
A rename is atomic for whoever looks, but a disk may keep the new name and lose what it names. So: every file, the
folders from the innermost outwards, the rename, the folder in which it happened.
"""

import errno
import hashlib
import os
import shutil
import stat
from pathlib import Path

from omnidraft import throttle
from omnidraft.private_files import USUAL, create

_PIECE_BYTES = 2**20
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""What file systems answer that cannot do it for folders."""


def sha256_of(path: Path) -> str:
    """Checksum of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            throttle.rest()
    return digest.hexdigest()


def link_or_copy(source: Path, destination: Path) -> None:
    """The same bytes under another name: a hard link where the disk allows it, else a copy."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination)
    except FileExistsError:
        raise
    except OSError:  # another disk, a file system without links, or somebody else's file
        create(destination, stat.S_IMODE(source.stat().st_mode))
        shutil.copyfile(source, destination)


def link_folder(source: Path, destination: Path) -> None:
    """Every file below `source` under the same relative name below `destination`, linked or copied."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link_or_copy(path, destination / path.relative_to(source))


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
