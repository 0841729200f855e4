"""Whether what long work will write can be written, asked before it begins."""

import os
from pathlib import Path

from omnidraft.errors import RequestError


def require_writable(path: Path, *, makes_folder: bool = True) -> None:
    """Raise RequestError if no file or folder can be made at this path.

    Args:
        makes_folder: whether the folder that it lies in is made where it is missing.
    """
    folder = path.absolute().parent
    if not folder.is_dir() and not makes_folder:
        raise RequestError(f"cannot write {path}: there is no folder {folder}")
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise RequestError(f"cannot write {path}: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
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
