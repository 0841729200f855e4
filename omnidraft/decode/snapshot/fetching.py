"""Fetches a worker's part of a snapshot: weights and n-gram cache, and the fleet's memory while it is there."""

from pathlib import Path

from omnidraft.errors import SnapshotNotFound
from omnidraft.ports import SnapshotReader
from omnidraft.snapshots.memory_part import WORKER_PARTS


def fetch_for_serving(registry: SnapshotReader, version: int, into: Path) -> Path:
    """Return a local snapshot folder with the worker's parts; without the memory of a version that lost it
    (`registry.keep_resume`). Raises SnapshotNotFound, SnapshotCorrupt, RegistryError."""
    try:
        return registry.fetch(version, into, WORKER_PARTS)
    except SnapshotNotFound:
        return registry.fetch(version, into)
