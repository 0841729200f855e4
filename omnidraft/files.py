"""Files that are whole or not there, and that survive a power failure.

A rename is atomic for readers, but after a power failure a disk may have the new name without its content. So the order
is: sync every file, then the folders from the innermost outwards, rename, sync the folder of the rename.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from omnidraft import throttle
from omnidraft.errors import RequestError, StorageError, cannot_write
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


def file_states(files: Iterable[Path]) -> list[list[str | int]]:
    """Return name, size and time of the last change of each file, as JSON holds them. Raises OSError."""
    states = [(file.name, file.stat()) for file in files]
    return [[name, status.st_size, status.st_mtime_ns] for name, status in states]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file aside, in its folder, which is made if it is missing, and put it in place. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as file:
        file.write(content)


def existing_ancestor(path: Path) -> Path:
    """Return the path if there is something at it, else the nearest of its parents at which there is."""
    while not path.exists():
        path = path.parent
    return path


def may_write(folder: Path) -> bool:
    """Return whether this process may make files in a folder that is there."""
    return os.access(folder, os.W_OK | os.X_OK)


def require_writable(path: Path, *, makes_folder: bool = True) -> None:
    """Raise RequestError if no file or folder can be made at this path.

    Args:
        makes_folder: whether the folder that it lies in is made where it is missing.
    """
    folder = path.absolute().parent
    if not folder.is_dir() and not makes_folder:
        raise RequestError(f"cannot write {path}: there is no folder {folder}")
    folder = existing_ancestor(folder)
    if not folder.is_dir():
        raise RequestError(f"cannot write {path}: {folder} is no folder")
    if not may_write(folder):
        raise RequestError(f"cannot write {path}: {folder} is not writable; name another place")


def require_empty(folder: Path) -> None:
    """Raise RequestError unless there is nothing there, or an empty folder."""
    if folder.is_dir() and any(folder.iterdir()):
        raise RequestError(f"{folder} is not empty; give a folder that is not there yet")
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; give a folder that is not there yet")


def require_writable_file(path: Path | None, *, makes_folder: bool = True) -> None:
    """The same of a file, of none for None."""
    if path is None:
        return
    if os.path.isdir(path):  # unlike Path.is_dir also of a name that is too long
        raise RequestError(f"cannot write {path}: it is a folder; name a file")
    if not os.path.exists(path) or os.path.isfile(path):
        require_writable(Path(os.path.realpath(path)), makes_folder=makes_folder)
    elif not os.access(path, os.W_OK):  # a pipe, as /dev/stdout may be, which is written to directly
        raise RequestError(f"cannot write {path}: it is not writable; name another file")


def save_json(report: Mapping[str, Any], path: Path) -> None:
    """Write indented JSON, as `save_text` does."""
    save_text(json.dumps(report, indent=2) + "\n", path)


def save_text(text: str, path: Path) -> None:
    """Write a text, aside first: an interrupted run leaves the last complete report.

    What is no file, such as a pipe at /dev/stdout, is written to directly. Raises RequestError when it cannot be
    written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path.resolve(), text)
    except OSError as exc:
        raise cannot_write(path, exc) from exc


_PIECE_BYTES = 2**20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            throttle.rest()
    return digest.hexdigest()


def link_or_copy(source: Path, destination: Path) -> None:
    """Give a file another name: a hard link where the disk allows it, else a copy."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination)
    except FileExistsError:
        raise
    except OSError:  # another disk, a file system without links, or another user's file
        _replace_by_copy(source, destination)


def link_folder(source: Path, destination: Path) -> None:
    """Link or copy every file below `source` to the same relative name below `destination`."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link_or_copy(path, destination / path.relative_to(source))


def separate(folder: Path) -> None:
    """Replace every hard link below a folder by a copy, so that nobody changes a file through its other name."""
    for path in [path for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink > 1]:
        _replace_by_copy(path, path)


def _replace_by_copy(source: Path, destination: Path) -> None:
    """Put a copy of the source, with its permissions, in the destination's place."""
    with source.open("rb") as original, written_aside(destination, stat.S_IMODE(source.stat().st_mode)) as file:
        shutil.copyfileobj(original, file)


def has_links(folder: Path) -> bool:
    """Return whether any file below a folder has another name."""
    return any(path.stat().st_nlink > 1 for path in folder.rglob("*") if path.is_file())


def sync_tree(folder: Path) -> None:
    """Sync everything below a folder, and the folder itself."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and sync each."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


@contextmanager
def whole_folder(folder: Path, name: str, advice: str = "") -> Iterator[Path]:
    """Yield the path of a folder to make beside this one; put it in place at the end. On any error nothing of it stays.

    Args:
        name: what the folder is called in the error's message; `advice` ends that.

    Raises:
        StorageError: the disk is full, or the files cannot be written for another reason.
    """
    from safetensors import SafetensorError

    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        sync_tree(partial)
        put_in_place(partial, folder)
    except (OSError, SafetensorError) as exc:  # safetensors has its own error for a full disk
        raise StorageError(f"{name} cannot be written: {exc}{advice}") from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str, rights: int = USUAL) -> None:
    """Replace the text of a file, all or nothing. `rights`: see private_files."""
    with replaced_file(path, rights) as file:
        file.write(text.encode())
