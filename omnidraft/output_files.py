"""Whether what long work will write can be written, asked before it begins."""

import os
from pathlib import Path

from omnidraft.errors import RequestError


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
