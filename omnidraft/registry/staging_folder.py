"""A process's own folder for staged snapshots: removed when the process ends, or by another one if it was killed.

A process holds the lock beside its folder for as long as it lives, also across containers that share the folder.
"""

import atexit
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX = "omnidraft-snapshots-"
LOCK = ".lock"


def own_folder(within: Path | None = None) -> Path:
    """Return a new folder, which nobody else may enter, for as long as this process lives.

    Args:
        within: None: the system's folder for temporary files.
    """
    remove_abandoned(within)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=within))
    lock = FileLock(_lock_of(folder), thread_local=False)
    lock.acquire()
    atexit.register(_remove, folder, lock)
    return folder


def remove_abandoned(within: Path | None = None) -> None:
    """Remove the folders of processes that were killed; those of others stay."""
    for path in (within or Path(tempfile.gettempdir())).glob(f"{PREFIX}*{LOCK}"):
        lock = FileLock(path, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except (Timeout, OSError):
            continue  # it lives, or is another user's
        _remove(path.with_name(path.name.removesuffix(LOCK)), lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _remove(folder: Path, lock: FileLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
    lock.release()
