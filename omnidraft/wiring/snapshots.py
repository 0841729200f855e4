"""A snapshot by name, for commands that measure or check one: a folder, a version or an alias."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.ports import SnapshotVersion
from omnidraft.wiring.logs import registry, signing_key
from omnidraft.wiring.models import SnapshotLoader

if TYPE_CHECKING:
    from omnidraft.decode.snapshot.slot import LoadedSnapshot


UNPUBLISHED = 0
"""The version number of a snapshot that lies in a folder of its own; registries count from 1."""


@contextmanager
def named_folder(settings: Settings, name: str) -> Iterator[tuple[SnapshotVersion, Path]]:
    """The verified snapshot in a folder of this name, else that version or alias of the registry, fetched for a while.

    Raises:
        SnapshotError: there is none of that name, or it is not signed as `registry.signing_key` asks.
    """
    from omnidraft.snapshots import bundle
    from omnidraft.snapshots.signature import require_signature

    folder = Path(name).expanduser()
    if folder.is_dir():
        manifest = bundle.verify(folder, ("serving",))
        require_signature(manifest, signing_key(settings))
        yield SnapshotVersion(UNPUBLISHED, manifest, aliases=(), created_ms=manifest.created_ms), folder
        return
    snapshots = registry(settings)
    found = snapshots.resolve(name)
    with tempfile.TemporaryDirectory(prefix="omnidraft-snapshot-") as staging:
        yield found, snapshots.fetch(found.version, Path(staging))


def named_snapshot(settings: Settings, load: SnapshotLoader, name: str) -> "LoadedSnapshot":
    """That snapshot, ready to serve. Raises SnapshotError, or VocabularyError when it belongs to another pair."""
    with named_folder(settings, name) as (version, folder):
        loaded = load(version, folder)
    return replace(loaded, version=None) if version.version == UNPUBLISHED else loaded
