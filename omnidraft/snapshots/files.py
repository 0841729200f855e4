"""Files that are written once and never changed: checksums, and sharing them without copying.

A hard link costs no space and no time, and is safe because a snapshot's files are never written to again.
"""

import hashlib
import os
import shutil
import stat
from pathlib import Path

from omnidraft import throttle
from omnidraft.private_files import create

_PIECE_BYTES = 2**20


def sha256_of(path: Path) -> str:
    """Checksum of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            throttle.rest()
    return digest.hexdigest()


def link_or_copy(source: Path, destination: Path) -> None:
    """The same bytes under another name: a hard link where the disk allows it, else a copy."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination)
    except FileExistsError:
        raise
    except OSError:  # another disk, a file system without links, or somebody else's file
        create(destination, stat.S_IMODE(source.stat().st_mode))
        shutil.copyfile(source, destination)


def link_folder(source: Path, destination: Path) -> None:
    """Every file below `source` under the same relative name below `destination`, linked or copied."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link_or_copy(path, destination / path.relative_to(source))
