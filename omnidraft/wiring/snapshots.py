"""A snapshot by name, for commands that measure or check one: a folder, a version or an alias."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.ports import SnapshotVersion
from omnidraft.wiring.logs import registry
from omnidraft.wiring.models import SnapshotLoader

if TYPE_CHECKING:
    from omnidraft.decode.slot import LoadedSnapshot


def named_snapshot(settings: Settings, load: SnapshotLoader, name: str) -> "LoadedSnapshot":
    """The snapshot in a folder of this name, else that version or alias of the registry.

    Raises:
        SnapshotError, VocabularyError: there is none of that name, or it belongs to another pair.
    """
    from omnidraft.snapshots import bundle

    folder = Path(name).expanduser()
    if folder.is_dir():
        manifest = bundle.verify(folder, ("serving",))
        unpublished = SnapshotVersion(version=0, manifest=manifest, aliases=(), created_ms=manifest.created_ms)
        return replace(load(unpublished, folder), version=None)
    snapshots = registry(settings)
    found = snapshots.resolve(name)
    with tempfile.TemporaryDirectory(prefix="omnidraft-snapshot-") as staging:
        return load(found, snapshots.fetch(found.version, Path(staging)))
