"""Install folders atomically, however many processes need them at once, where the disk has space for them.

A folder is made aside, gets a marker with its origin, and is renamed last, when all of it is on the disk, under a file
lock.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from omnidraft.errors import ModelDownloadError, ModelError
from omnidraft.files import may_write, put_in_place, sync_tree
from omnidraft.models.catalog import gguf_conversion

MARKER = "omnidraft.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of an installed folder."""

    source: Literal["hub", "wheels", "file"]
    fingerprint: str
    """Revision on the hub, or sha256 of the GGUF file."""
    converter: str | None = None
    """The version of the converter that wrote it; None for files that are as they were fetched."""


def is_complete(folder: Path) -> bool:
    """Return whether the folder was installed here completely, and would be converted to the same today."""
    origin = read_origin(folder)
    return origin is not None and (origin.source == "hub" or origin.converter == gguf_conversion.VERSION)


def read_origin(folder: Path) -> Origin | None:
    """Return the origin of an installed folder, None for a folder that was not installed here, or whose marker was lost
    in a power failure."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return Origin(found["source"], found["fingerprint"], found.get("converter"))  # a later release may tell more
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None


def install_once(
    folder: Path, source: str, make: Callable[[Path], Origin], is_usable: Callable[[Path], bool] = is_complete
) -> Path:
    """Return the folder; one that is not usable is made aside, marked and renamed. An unfinished one is resumed."""
    from filelock import FileLock

    if is_usable(folder):  # perhaps where nothing can be written
        return folder
    make_folder(folder.parent)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if is_usable(folder):
            return folder
        partial = folder.with_name(f".{folder.name}.{source}.partial")
        partial.mkdir(exist_ok=True)
        origin = make(partial)
        (partial / MARKER).write_text(json.dumps(asdict(origin), indent=2) + "\n", encoding="utf-8")
        sync_tree(partial)
        shutil.rmtree(folder, ignore_errors=True)  # not ours, incomplete, or of another converter
        put_in_place(partial, folder)
    return folder


def make_folder(folder: Path) -> None:
    """Make a folder for models, with those that it lies in. Raises ModelError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if may_write(folder):
            return
        reason = "it is not writable"
    except OSError as exc:
        reason = str(exc.strerror)
    raise ModelError(f"no model can be put into {folder}: {reason}; give OMNIDRAFT_HOME a place that can be written")


def require_space(name: str, needed_bytes: int, folder: Path) -> None:
    """Raise ModelDownloadError, with both numbers, when the disk of `folder` has less free space."""
    available_bytes = shutil.disk_usage(folder).free
    if available_bytes < needed_bytes:
        raise ModelDownloadError(
            f"{name} needs {needed_bytes:,} bytes of disk space in {folder}, {available_bytes:,} bytes are free"
        )
