"""The certificate that weights forgot a tenant: which snapshot learning went back to, what it learned again, and the
digest of every file that came out, which are those of a run that never saw the tenant.

It is a DSSE envelope of JSON, signed with the key that signs snapshots, if this process has one. The tenant is in it as
the SHA-256 of its name. Whoever has the log and the settings can compute the files again (docs/security.md).
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnidraft.errors import RequestError, SignatureRefused
from omnidraft.files import write_text
from omnidraft.ports import Forget, SnapshotVersion
from omnidraft.snapshots.keys import END_MS, TrustedKeys, read_envelope
from omnidraft.snapshots.manifest import digest
from omnidraft.snapshots.signing import SIGNERS, SnapshotSigning

PAYLOAD_TYPE = "application/vnd.omnidraft.forgetting+json"

Derivation = tuple[SnapshotVersion, SnapshotVersion]
"""The snapshot that learning went back to, and the first one in which everything is learned again."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CertifiedSnapshot(_Part):
    """A snapshot, and the digests of its manifest and of its files."""

    version: int
    snapshot_id: str
    digest: str
    offsets: dict[int, int]
    sha256: dict[str, str]


class Certificate(_Part):
    """What a certificate says."""

    tenant_sha256: str
    order: str
    target: str
    drafter: str
    start: CertifiedSnapshot
    result: CertifiedSnapshot
    log_id: str | None
    num_records: int
    num_steps: int
    settings: dict[str, Any]
    code_version: str
    created_ms: int = Field(ge=0, lt=END_MS)


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
    start = origin(versions, order, result)
    if order.concerns(start.manifest):
        what = "the log or the snapshot to go back to was gone when the distiller heard of the order"
        raise RequestError(f"{what}, so the tenant was forgotten but for the weights: version {result.version}")
    return start, result


def origin(versions: Sequence[SnapshotVersion], order: Forget, version: SnapshotVersion) -> SnapshotVersion:
    """Return the snapshot that learning went back to for the order, which this version carries out."""
    by_id = {each.manifest.snapshot_id: each for each in versions}
    while order.id in version.manifest.forgets and (parent := by_id.pop(version.manifest.parent_id or "", None)):
        version = parent
    return version


def write_certificate(folder: Path, tenant: str, order: Forget, derived: Derivation, signing: SnapshotSigning) -> Path:
    """Write the certificate into this folder and return its path. Raises ConfigError: the key may sign no snapshots."""
    start, result = derived
    of = result.manifest
    said = Certificate(
        tenant_sha256=name_digest(tenant),
        order=order.id,
        start=_facts(start),
        result=_facts(result),
        num_records=of.num_records - start.manifest.num_records,
        num_steps=of.num_steps - start.manifest.num_steps,
        created_ms=time.time_ns() // 1_000_000,
        **{name: getattr(of, name) for name in ("target", "drafter", "log_id", "settings", "code_version")},
    )
    path = folder / f"forgotten-{of.snapshot_id}.json"
    write_text(path, json.dumps(signing.envelope(said.model_dump_json().encode(), PAYLOAD_TYPE), indent=2) + "\n")
    return path


def read_certificate(document: Mapping[str, Any], keys: Sequence[str]) -> tuple[Certificate, bool]:
    """Return what a certificate says and whether it is signed, by one of these public keys if there are any. Raises
    SignatureRefused."""
    payload, signatures = read_envelope(document, PAYLOAD_TYPE)
    try:
        said = Certificate.model_validate_json(payload)
    except ValidationError as exc:
        raise SignatureRefused(f"it is no certificate of this release: {exc.errors()[0]['msg']}") from exc
    if keys:
        try:
            TrustedKeys(keys).verify(payload, PAYLOAD_TYPE, signatures, SIGNERS)
        except SignatureRefused as exc:
            why = "it was changed, or none of the given keys signed it" if signatures else "it is unsigned"
            raise SignatureRefused(why) from exc
    return said, bool(signatures)


def name_digest(tenant: str) -> str:
    """Return the SHA-256 of a tenant's name, which stands for it."""
    return hashlib.sha256(tenant.encode()).hexdigest()


def _facts(version: SnapshotVersion) -> CertifiedSnapshot:
    of = version.manifest
    fields = {name: getattr(of, name) for name in ("snapshot_id", "offsets", "sha256")}
    return CertifiedSnapshot(version=version.version, digest=digest(of), **fields)
