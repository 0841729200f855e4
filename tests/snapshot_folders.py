"""Small snapshot folders for tests."""

from pathlib import Path
from typing import Any

import numpy as np

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
