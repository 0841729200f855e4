"""Folders that are there whole or not at all, however many processes ask for them at once.

A folder is made aside, gets a marker that says what it was made from, and is renamed last, under a file lock.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

MARKER = "omnidraft.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a folder was made from."""

    source: Literal["hub", "wheels", "file"]
    fingerprint: str
    """Revision on the hub, or sha256 of the GGUF file."""


def is_complete(folder: Path) -> bool:
    """Whether the folder was made here to its end."""
    return (folder / MARKER).is_file()


def read_origin(folder: Path) -> Origin | None:
    """What an installed folder was made from; None for a folder that is not from here."""
    if not is_complete(folder):
        return None
    return Origin(**json.loads((folder / MARKER).read_text(encoding="utf-8")))


def install_once(folder: Path, source: str, make: Callable[[Path], Origin]) -> Path:
    """The folder; made aside, marked and renamed if it is not there. An unfinished one is taken up again."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if is_complete(folder):
            return folder
        partial = folder.with_name(f".{folder.name}.{source}.partial")
        partial.mkdir(exist_ok=True)
        made = make(partial)
        (partial / MARKER).write_text(json.dumps(asdict(made), indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # unmarked, so not ours or not whole
        partial.rename(folder)
    return folder
