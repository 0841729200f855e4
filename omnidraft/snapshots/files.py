"""Files of snapshots: checksums, hard links instead of copies, and writes that survive a power failure (see
durable_files.py).

A hard link costs no space and no time, and is safe because a snapshot's files are never written again.
"""

import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omnidraft import throttle
from omnidraft.durable_files import put_in_place, replaced_file, sync, written_aside
from omnidraft.errors import StorageError
from omnidraft.private_files import USUAL

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
    with written_aside(destination, stat.S_IMODE(source.stat().st_mode)) as file:
        shutil.copyfile(source, file.name)


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
