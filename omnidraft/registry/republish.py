"""Publish an earlier version once more, as the newest: learning goes on from it."""

import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from omnidraft.errors import SnapshotNotFound
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest


def republish(registry: Registry, name: str) -> SnapshotVersion:
    """Return the new version, a child of the one that it copies. Without that one's resume part, which only the newest
    versions keep, learning goes on from its weights with a new optimizer.

    Raises:
        SnapshotNotFound: there is no version of this name, or its files are deleted.
        SnapshotStale: a distiller published meanwhile; try again.
        SnapshotError: it cannot be read or written.
    """
    latest = registry.resolve("latest")
    chosen = registry.resolve(name)
    with tempfile.TemporaryDirectory(prefix="omnidraft-republish-") as temporary:
        folder, parts = _fetch(registry, chosen, Path(temporary))
        own = {
            "snapshot_id": uuid.uuid4().hex,
            "parent_id": chosen.manifest.snapshot_id,
            "created_ms": time.time_ns() // 1_000_000,
            "continues_id": None,
            "is_republished": True,
            "restarts": latest.manifest.restarts,  # those were carried out; this is another one
            "signature": None,
            "signatures": {},
            **_unchanged(chosen.manifest),
        }
        files = {each: folder / each for each in chosen.manifest.sha256 if each.partition("/")[0] in parts}
        copy = Path(temporary) / "copy"
        bundle.write(copy, chosen.manifest.model_copy(update=own), files)
        return registry.publish(copy, latest.version)


def _unchanged(manifest: Manifest) -> dict[str, Any]:
    """Return what was measured of a snapshot, as it is beside its parent when that is its copy: nothing changed. Else
    the gate would count the change that led to the copied version once more."""
    return {
        "losses": {},
        "agreement_before": manifest.agreement_after,
        "agreement_change_error": None if manifest.agreement_after is None else 0.0,
        "tenants": tuple(
            each.model_copy(update={"before": each.after, "change_error": 0.0}) for each in manifest.tenants
        ),
        "pinned": manifest.pinned and manifest.pinned.model_copy(update={"before": manifest.pinned.after}),
        "speedup_before": manifest.speedup_after,
    }


def _fetch(registry: Registry, chosen: SnapshotVersion, into: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder and the parts in it."""
    parts = bundle.parts_of(chosen.manifest)
    try:
        return registry.fetch(chosen.version, into, parts), parts
    except SnapshotNotFound:
        return registry.fetch(chosen.version, into, ("serving",)), ("serving",)
