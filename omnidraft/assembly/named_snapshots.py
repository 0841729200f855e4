"""Snapshots by the names that people give them: a folder, a version or an alias."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from omnidraft.assembly.existing import existing_registry
from omnidraft.assembly.logs import registry
from omnidraft.assembly.signing import snapshot_signing
from omnidraft.assembly.snapshot_loading import SnapshotLoader
from omnidraft.config import Settings
from omnidraft.decode.snapshot.loading import fetch_for_serving
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.errors import SnapshotError, SnapshotNotFound
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.snapshots.bundle import WORKER_PARTS

logger = logging.getLogger(__name__)

UNPUBLISHED = 0
"""The version number of a snapshot in a folder outside the registry; registries count from 1."""


@contextmanager
def named_folder(settings: Settings, name: str) -> Iterator[tuple[SnapshotVersion, Path]]:
    """Yield the verified snapshot in the folder of this name, else the version or alias of the registry, fetched into a
    temporary folder.

    Raises:
        SnapshotError: there is none of that name, or it lacks the signature of who this process trusts.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        parts = [part for part in WORKER_PARTS if part == "serving" or (folder / part).is_dir()]
        manifest = bundle.verify(folder, parts)
        snapshot_signing(settings).require(manifest)
        yield SnapshotVersion(UNPUBLISHED, manifest, aliases=(), created_ms=manifest.created_ms), folder
        return
    with _fetched(existing_registry(settings), name) as (version, folder):
        yield version, folder


@contextmanager
def _fetched(snapshots: Registry, name: str) -> Iterator[tuple[SnapshotVersion, Path]]:
    """Yield the version or alias of the registry, fetched into a temporary folder. Raises SnapshotError."""
    version = snapshots.resolve(name)
    with tempfile.TemporaryDirectory(prefix="omnidraft-snapshot-") as staging:
        yield version, fetch_for_serving(snapshots, version.version, Path(staging))


def require_named(settings: Settings, name: str | None) -> None:
    """Raise SnapshotError unless there is a folder, a version or an alias of this name, or none is named: before what
    takes long."""
    if name is not None and not Path(name).expanduser().is_dir():
        existing_registry(settings).resolve(name)


def named_or_base(settings: Settings, load: SnapshotLoader, name: str | None) -> LoadedSnapshot:
    """Load the snapshot of this name, the base drafter without one. Raises SnapshotError, or VocabularyError when it
    belongs to another pair."""
    if name is None:
        return load(None, None)
    with named_folder(settings, name) as (version, folder):
        loaded = load(version, folder)
    return replace(loaded, version=None) if version.version == UNPUBLISHED else loaded


def champion_or_base(settings: Settings, load: SnapshotLoader) -> LoadedSnapshot:
    """Load the champion; the base drafter where there is none, or none that can be read."""
    try:
        with _fetched(registry(settings), "champion") as (version, folder):
            return load(version, folder)
    except SnapshotNotFound:
        pass
    except SnapshotError as exc:
        logger.warning("%s begins without its champion: %s", settings.models.target, exc)
    return load(None, None)
