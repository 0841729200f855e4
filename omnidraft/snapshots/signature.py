"""Signatures of snapshots: HMAC-SHA256 over the manifest, which has the checksum of every file.

The signed text is the manifest as JSON with sorted keys, without `signature` and without fields at their defaults, so
that fields added later do not invalidate old signatures. The signature does not cover the version number.
"""

import hmac
import json

from omnidraft.errors import SnapshotCorrupt
from omnidraft.snapshots.manifest import Manifest


def sign(manifest: Manifest, key: str | None) -> Manifest:
    """Return the manifest with its signature, or unchanged without a key."""
    return manifest if key is None else manifest.model_copy(update={"signature": _signature(manifest, key)})


def require_signature(manifest: Manifest, key: str | None) -> None:
    """Raise SnapshotCorrupt unless the manifest was signed with this key; without a key nothing is required."""
    if key is None:
        return
    name, advice = f"snapshot {manifest.snapshot_id}", "publish it again from a copy that you trust"
    if manifest.signature is None:
        raise SnapshotCorrupt(f"{name} has no signature, and registry.signing_key asks for one; {advice}")
    if not hmac.compare_digest(manifest.signature.encode(), _signature(manifest, key).encode()):
        raise SnapshotCorrupt(f"{name} was changed, or signed with another key than registry.signing_key; {advice}")


def _signature(manifest: Manifest, key: str) -> str:
    fields = manifest.model_dump(mode="json", exclude={"signature"}, exclude_defaults=True)
    return hmac.digest(key.encode(), json.dumps(fields, sort_keys=True).encode(), "sha256").hex()
