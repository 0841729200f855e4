"""The manifest of a snapshot, and its signature.

Folder layout (bundle.py reads and writes it):
    manifest.json
    serving/drafter.safetensors     absent in the first snapshot: the base drafter as it is; may hold an acceptance head
    serving/ngrams.safetensors      the n-gram cache, packed arrays
    serving/tenants/...             low-rank factors of single tenants over that drafter, one file each
    memory/...                      the fleet's memory, one file an owner of texts; see memory_part.py
    resume/...                      master weights, optimizer, random state: only the distiller reads them

Signatures are over the manifest, which has the checksum of every file: the signed text is the manifest as JSON with
sorted keys, without the signatures and without fields at their defaults, so that fields added later do not invalidate
old signatures. They do not cover the version number, which the registry gives: signed control values bind it (see
fleet/control_signing.py).
"""

import hashlib
import json

from pydantic import BaseModel, ConfigDict

LEAST_TENANT_REQUESTS = 4
"""Held-out requests of a tenant from which on it is measured, and judged, apart from the small ones."""


class TenantAgreement(BaseModel):
    """Held-out agreement of one tenant's requests, before and after, on the same records."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tenant: str | None
    """None: the tenants with too few requests to be judged apart, together."""
    num_requests: int
    before: float
    after: float
    change_error: float | None
    """Standard error of after - before; None with a single request."""


class TenantFactors(BaseModel):
    """Low-rank factors that learned from one tenant's records only, and the agreement of this snapshot's drafter
    without and with them on the tenant's held-out requests."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tenant: str
    version: int
    """How many times they were fitted, each time on the weights of the snapshot that was being made."""
    base: str
    """Digest of the weights that they were fitted on last (tenant_factors.weights_digest); they fit no others."""
    rank: int
    num_requests: int
    before: float
    after: float
    change_error: float | None
    """Standard error of after - before; None with a single request."""
    file: str | None
    """The factors for workers. None: they are not better beyond the error, and the drafter serves the tenant as all
    others."""


class PinnedAgreement(BaseModel):
    """Agreement on the records of `learner.pinned_held_out`, which no writer of the log can change."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sha256: str
    """Hash of the file; only agreements on the same file are compared."""
    num_records: int
    before: float
    after: float


class Manifest(BaseModel):
    """The metadata of a snapshot. It is written last: a folder without it is not a snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    snapshot_id: str
    parent_id: str | None = None
    """None for the first snapshot of a pair."""
    target: str
    drafter: str
    drafter_hash: str
    """Hash of the base drafter's weights; the snapshot fits no other base."""
    alignment: str
    """Fingerprint of the vocabulary pair; see vocab/alignment.py."""
    train: str = "base"
    """base, full or lora: the content of serving/drafter.safetensors."""
    settings: dict[str, str] = {}
    """Training settings: loss, learning rate, batch; they are parameters in the registry."""
    offsets: dict[int, int] = {}
    """Partition -> next offset of the trace topic: every record before it is learned or counted in `counts`."""
    num_records: int = 0
    """Records learned since the base drafter."""
    num_tokens: int = 0
    num_steps: int = 0
    losses: dict[str, float] = {}
    """Means over the steps since the parent."""
    held_out_records: int = 0
    agreement_before: float | None = None
    """Held-out agreement of the parent, on the same records as agreement_after."""
    agreement_after: float | None = None
    agreement_change_error: float | None = None
    """Standard error of agreement_after - agreement_before, which were measured on the same records."""
    tenants: tuple[TenantAgreement, ...] = ()
    """The same by tenant, bounded in number. It is the operator's: tenants are shown no manifests."""
    tenant_factors: tuple[TenantFactors, ...] = ()
    """The tenants that have factors of their own, and whether these serve them. It is the operator's, too."""
    pinned: PinnedAgreement | None = None
    """None: learner.pinned_held_out is not set."""
    speedup_before: float | None = None
    """Predicted speedup of the parent over plain decoding, from its hits on the same records and the times in them."""
    speedup_after: float | None = None
    """The same prediction for this snapshot."""
    log_id: str | None = None
    """Identity of the log of the offsets; None: nothing was read."""
    restarts: tuple[str, ...] = ()
    """Names of the executed `learning restart` orders. If there is one more than in the parent, learning restarted at
    these offsets."""
    continues_id: str | None = None
    """The snapshot whose offsets and counts this one continues; None: the parent. They differ where learning went back
    to earlier weights and on from its own place in the log."""
    forgets: tuple[str, ...] = ()
    """Names of the newest orders to forget a tenant that were carried out: nothing of these tenants from before them is
    in the n-gram cache or among the kept records."""
    catching_up_to: dict[int, int] = {}
    """Partition -> offset up to which the log is learned again without a tenant that weights forget; until then no
    snapshot is a challenger. Empty: nothing is learned again."""
    counts: dict[str, int] = {}
    """Records skipped, by reason, since the base drafter."""
    passed_over: dict[int, int] = {}
    """Partition -> the first of the offsets that the learner passed over since it lagged; they reach up to `offsets`.
    """
    traceparent: str | None = None
    """W3C trace context of the publication; None: the distiller was not traced."""
    code_version: str = ""
    created_ms: int = 0
    sha256: dict[str, str] = {}
    """Relative path -> checksum of every other file."""
    signatures: dict[str, str] = {}
    """Id of a public key -> the Ed25519 signature of all fields but the signatures, in hex."""


def signed_payload(manifest: Manifest) -> bytes:
    """Return what a signature covers."""
    fields = manifest.model_dump(mode="json", exclude={"signatures"}, exclude_defaults=True)
    return json.dumps(fields, sort_keys=True).encode()


def digest(manifest: Manifest) -> str:
    """Return the SHA-256 of what signatures cover, in hex: the identity of a snapshot's content."""
    return hashlib.sha256(signed_payload(manifest)).hexdigest()
