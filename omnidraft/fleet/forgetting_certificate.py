"""The certificate that weights forgot a tenant: which snapshot learning went back to, what it learned again, and the
digest of every file that came out, which are those of a run that never saw the tenant.

It is a DSSE envelope of JSON, signed with the key that signs snapshots, if this process has one. The tenant is in it as
the SHA-256 of its name. Whoever has the log and the settings can compute the files again (docs/security.md).
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnidraft.errors import RequestError
from omnidraft.files import write_text
from omnidraft.ports import Forget, SnapshotVersion
from omnidraft.snapshots.manifest import digest
from omnidraft.snapshots.signing import SnapshotSigning

PAYLOAD_TYPE = "application/vnd.omnidraft.forgetting+json"

Derivation = tuple[SnapshotVersion, SnapshotVersion]
"""The snapshot that learning went back to, and the first one in which everything is learned again."""


def derivation(versions: Sequence[SnapshotVersion], order: Forget) -> Derivation | None:
    """Return how weights forgot the tenant; None as long as it is not done.

    Args:
        versions: oldest first.

    Raises:
        RequestError: the distiller found no snapshot from before the tenant, so weights keep what they learned.
    """
    carried_out = [each for each in versions if order.id in each.manifest.forgets]
    result = next((each for each in carried_out if not each.manifest.catching_up_to), None)
    if result is None:
        return None
    by_id, start = {each.manifest.snapshot_id: each for each in versions}, result
    while order.id in start.manifest.forgets and (parent := by_id.pop(start.manifest.parent_id or "", None)):
        start = parent
    if order.concerns(start.manifest):
        what = "the log or the snapshot to go back to was gone when the distiller heard of the order"
        raise RequestError(f"{what}, so the tenant was forgotten but for the weights: version {result.version}")
    return start, result


def write_certificate(folder: Path, tenant: str, order: Forget, derived: Derivation, signing: SnapshotSigning) -> Path:
    """Write the certificate into this folder and return its path. Raises ConfigError: the key may sign no snapshots."""
    start, result = derived
    content = {
        "tenant_sha256": hashlib.sha256(tenant.encode()).hexdigest(),
        "order": order.id,
        "target": result.manifest.target,
        "drafter": result.manifest.drafter,
        "start": _facts(start),
        "result": _facts(result) | {"sha256": result.manifest.sha256},
        "log_id": result.manifest.log_id,
        "num_records": result.manifest.num_records - start.manifest.num_records,
        "num_steps": result.manifest.num_steps - start.manifest.num_steps,
        "settings": result.manifest.settings,
        "code_version": result.manifest.code_version,
        "created_ms": time.time_ns() // 1_000_000,
    }
    envelope = signing.envelope(json.dumps(content, sort_keys=True).encode(), PAYLOAD_TYPE)
    path = folder / f"forgotten-{result.manifest.snapshot_id}.json"
    write_text(path, json.dumps(envelope, indent=2) + "\n")
    return path


def _facts(version: SnapshotVersion) -> dict[str, Any]:
    manifest = version.manifest
    return {
        "version": version.version,
        "snapshot_id": manifest.snapshot_id,
        "digest": digest(manifest),
        "offsets": manifest.offsets,
    }
