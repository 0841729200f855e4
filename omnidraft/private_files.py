"""Files of which others must keep off: users' text, which only its owner may read from its creation on, whatever the
umask, and what runs as code, which nobody else may have written."""

import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

PRIVATE, PRIVATE_FOLDER, USUAL = 0o600, 0o700, 0o666
"""Permissions before the umask is applied."""


def create(path: Path, rights: int) -> int:
    """Create an empty file unless the path exists, with these permissions; return the file's permissions.

    A file that exists is not even opened: closing it would drop all locks that this process has on it, SQLite's too.
    """
    with suppress(FileExistsError):
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, rights))
    return stat.S_IMODE(path.stat().st_mode)


def private_opener(path: str, flags: int) -> int:
    """Open a file that only its owner may read: `open(..., opener=private_opener)`."""
    return os.open(path, flags, PRIVATE)


def make_folder(path: Path) -> None:
    """Create a folder and those above it that are missing, for their owner only. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def require_unshared_folder(folder: Path) -> None:
    """Raise PermissionError if somebody else could put files into this folder, or put another in its place.

    Folders further above are not looked at.
    """
    _require_unshared(folder, folder.stat())
    parent = folder.resolve().parent
    status = parent.stat()
    if not status.st_mode & stat.S_ISVTX:  # only owners replace what lies in a sticky folder
        _require_unshared(parent, status)


def require_unshared_file(path: Path, status: os.stat_result | None = None) -> None:
    """Raise PermissionError if somebody else could have written this file.

    Args:
        status: of the file, where it is open already.
    """
    _require_unshared(path, status or path.stat())


def _require_unshared(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError unless it is this user's or root's, and nobody else may write to it."""
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, who could run code as user {os.geteuid()} by it; "
            f"delete it, or have OMNIDRAFT_HOME name a folder of your own"
        )
    is_shared = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    if is_shared or status.st_mode & stat.S_IWOTH:
        raise PermissionError(
            f"others may write to {path}, and could run code as user {os.geteuid()} by it; "
            f"delete it, or, if you trust what it holds, `chmod -R go-w {path}`"
        )


def _is_own_group(group_id: int) -> bool:
    """Return whether this group has nobody but this user: many systems give each user one of his own name."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return group_id == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
