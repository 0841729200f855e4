"""Check the free disk space before a download or conversion."""

import shutil
from collections.abc import Callable
from pathlib import Path

from omnidraft.errors import ModelDownloadError

FreeBytes = Callable[[Path], int]


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that `folder` is on."""
    return shutil.disk_usage(folder).free


def require_space(name: str, needed_bytes: int, folder: Path, *, free: FreeBytes = free_bytes) -> None:
    """Raise ModelDownloadError, with both numbers, when the disk of `folder` has less free space."""
    available_bytes = free(folder)
    if available_bytes < needed_bytes:
        raise ModelDownloadError(
            f"{name} needs {needed_bytes:,} bytes of disk space in {folder}, {available_bytes:,} bytes are free"
        )
