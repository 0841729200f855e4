"""The registry of a worker that follows none."""

from collections.abc import Sequence
from pathlib import Path

from omnidraft.errors import SnapshotNotFound
from omnidraft.ports import SnapshotReader, SnapshotVersion


class EmptyRegistry(SnapshotReader):
    """Implements ports.SnapshotReader."""

    def resolve(self, name: str) -> SnapshotVersion:
        """See ports.SnapshotReader. Raises SnapshotNotFound."""
        raise SnapshotNotFound(f"there is no version {name!r}: no registry is in use")

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        """See ports.SnapshotReader. Raises SnapshotNotFound."""
        raise SnapshotNotFound(f"there is no version {version}: no registry is in use")
