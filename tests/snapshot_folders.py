"""Small snapshot folders for tests."""

from pathlib import Path
from typing import Any

import numpy as np

from omnidraft.ports import SnapshotVersion
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest


def manifest(snapshot_id: str = "s1", **fields: Any) -> Manifest:
    """Of a small pair."""
    told = {"target": "big", "drafter": "org/small", "drafter_hash": "d", "alignment": "a", "created_ms": 1}
    return Manifest(snapshot_id=snapshot_id, **(told | fields))


def version_folder(root: Path, version: int) -> Path:
    """Return where the one pair of a directory registry keeps this version."""
    (folder,) = root.glob(f"*/v{version:06d}")
    return folder


def make_bundle(folder: Path, snapshot_id: str = "s1", **fields: Any) -> Path:
    """A snapshot folder with both parts; the weights differ from snapshot to snapshot."""
    weights = np.full(4, sum(snapshot_id.encode()), dtype=np.float32)
    parts = {
        "serving/drafter.safetensors": {"w": weights},
        "serving/ngrams.safetensors": {"keys": np.arange(3, dtype=np.uint32)},
        "resume/optimizer.safetensors": {"m": weights},
    }
    bundle.write(folder / snapshot_id, manifest(snapshot_id, **fields), parts)
    return folder / snapshot_id


def publish_copy(registry: DirectoryRegistry, name: str, folder: Path) -> SnapshotVersion:
    """What is left of a version, published once more as the newest, its child."""
    chosen = registry.resolve(name)
    parts = bundle.parts_of(chosen.manifest, chosen.removed_parts)
    fetched = registry.fetch(chosen.version, folder / "fetched", parts)
    files = {each: fetched / each for each in chosen.manifest.sha256 if each.partition("/")[0] in parts}
    own = {"snapshot_id": "copy", "parent_id": chosen.manifest.snapshot_id, "continues_id": None}
    bundle.write(folder / "copy", chosen.manifest.model_copy(update=own), files)
    return registry.publish(folder / "copy", registry.resolve("latest").version)
