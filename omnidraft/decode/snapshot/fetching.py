"""Fetches a worker's part of a snapshot: weights and n-gram cache, and the fleet's memory while it is there."""

import logging
from pathlib import Path

from omnidraft.errors import SnapshotCorrupt, SnapshotNotFound
from omnidraft.ports import SnapshotReader
from omnidraft.snapshots.memory_part import WORKER_PARTS

logger = logging.getLogger(__name__)


def fetch_for_serving(registry: SnapshotReader, version: int, into: Path) -> Path:
    """Return a local snapshot folder with the worker's parts; without the memory where the version lost it
    (`registry.keep_resume`) or it is damaged. Raises SnapshotNotFound, SnapshotCorrupt, RegistryError."""
    try:
        return registry.fetch(version, into, WORKER_PARTS)
    except SnapshotNotFound:
        return registry.fetch(version, into)
    except SnapshotCorrupt as exc:
        folder = registry.fetch(version, into)  # raises it again where more than the memory is damaged
        logger.error("version %d is used without its memory: %s", version, exc)
        return folder
