"""Going back to another snapshot because one tenant's traffic fell: what the other tenants lose by it counts, too.

Otherwise a tenant could choose the champion for all: his traffic falls as soon as a snapshot serves, and the one before
returns; or he sends what a refused snapshot knows best, and that one is found to agree best with his traffic. So a
snapshot that was never champion's ancestor has to pass the promotion gate, and an ancestor must not undo what other
tenants gained since, by the gate's tests of tenants on the same held-out records.
"""

from collections.abc import Sequence

from omnidraft.config import ControllerSettings
from omnidraft.fleet.promotion import decide, lineage_between
from omnidraft.fleet.tenant_gate import fallen_tenants
from omnidraft.ports import SnapshotVersion
from omnidraft.snapshots.manifest import Manifest, TenantAgreement


def objection(
    candidate: SnapshotVersion,
    champion: SnapshotVersion,
    versions: Sequence[SnapshotVersion],
    settings: ControllerSettings,
    *,
    tenant: str,
) -> str | None:
    """Return why the candidate may not replace the champion for the sake of this tenant's traffic; None: it may."""
    undone = _lineage(versions, candidate.manifest, champion.manifest)
    if undone:
        reverted = [_reverted(each, tenant) for each in undone]
        falls = fallen_tenants(reverted, (), tolerance=settings.tolerance)
        return "; ".join(map(str, falls)) or None
    since = _lineage(versions, champion.manifest, candidate.manifest)
    if not since:
        return "neither descends from the other, so the other tenants' agreement cannot be compared"
    decision = decide(candidate.manifest, champion.manifest, settings, between=since[:-1])
    return None if decision.promote else decision.reason


def _lineage(versions: Sequence[SnapshotVersion], old: Manifest, new: Manifest) -> list[Manifest]:
    """Return the snapshots from the child of the old one to the new one; empty when that does not descend from it."""
    between = lineage_between(versions, new, old)
    is_child = new.parent_id == old.snapshot_id
    return [*between, new] if between or is_child else []


def _reverted(manifest: Manifest, tenant: str) -> Manifest:
    """Return the manifest as if the snapshot were undone, for all tenants but this one."""
    others = [
        TenantAgreement(
            tenant=each.tenant,
            num_requests=each.num_requests,
            before=each.after,
            after=each.before,
            change_error=each.change_error,
        )
        for each in manifest.tenants
        if each.tenant != tenant
    ]
    return manifest.model_copy(update={"tenants": tuple(others)})
