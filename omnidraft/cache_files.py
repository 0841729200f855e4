"""Small files of the user's cache, which no reader finds half written, and what tells that the files that they were
made of have changed."""

from collections.abc import Iterable
from pathlib import Path

from omnidraft.durable_files import replaced_file


def file_states(files: Iterable[Path]) -> list[list[str | int]]:
    """Return name, size and time of the last change of each file, as JSON holds them. Raises OSError."""
    states = [(file.name, file.stat()) for file in files]
    return [[name, status.st_size, status.st_mtime_ns] for name, status in states]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file aside, in its folder, which is made if it is missing, and put it in place. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as file:
        file.write(content)
