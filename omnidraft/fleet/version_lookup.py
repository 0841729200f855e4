"""Looks up the version that a name stands for, where there may be none."""

from omnidraft.errors import SnapshotNotFound
from omnidraft.ports import SnapshotReader, SnapshotVersion


def find_version(registry: SnapshotReader, name: str) -> SnapshotVersion | None:
    """Return the version with this number or alias, or the `latest`; None without one. Raises as `resolve` does."""
    try:
        return registry.resolve(name)
    except SnapshotNotFound:
        return None
