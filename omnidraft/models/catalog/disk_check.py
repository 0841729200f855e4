"""Refuse before it starts what would fill the disk."""

import shutil
from collections.abc import Callable
from pathlib import Path

from omnidraft.errors import ModelDownloadError

FreeBytes = Callable[[Path], int]


def free_bytes(folder: Path) -> int:
    """Free space of the disk that `folder` is on."""
    return shutil.disk_usage(folder).free


def require_space(name: str, needed_bytes: int, folder: Path, *, free: FreeBytes = free_bytes) -> None:
    """Raises ModelDownloadError, with both figures, when `folder` has not that much room."""
    available_bytes = free(folder)
    if available_bytes < needed_bytes:
        raise ModelDownloadError(
            f"{name} needs {needed_bytes:,} bytes of disk space in {folder}, {available_bytes:,} bytes are free"
        )
