"""Where learning starts, and the start from which it never heard of tenants whom weights are to forget."""

import logging
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omnidraft.distill.ingest.batcher import TENANTS
from omnidraft.distill.ingest.record_disposition import ANYBODY, hash_63
from omnidraft.distill.publisher import BATCHER, Restored
from omnidraft.errors import SnapshotCorrupt, SnapshotNotFound
from omnidraft.ports import Forget, Offsets, Registry, SnapshotVersion
from omnidraft.snapshots import bundle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Where learning starts: from this snapshot, at these offsets, without these tenants."""

    snapshot: Restored | None = None
    """None: the weights as they are."""
    offsets: Offsets | None = None
    """None: those of the snapshot, with its counts and held-out records; without a snapshot, those of now."""
    without: Mapping[str, Forget] = field(default_factory=dict)
    """Orders to forget tenants."""
    catching_up_to: Offsets = field(default_factory=dict)
    """Not empty: the snapshot never heard of any tenant that is to be forgotten, so its n-gram cache stays; and none is
    a challenger before the log is learned again up to here."""


def newest_without(
    registry: Registry, orders: Mapping[str, Forget], log_id: str, firsts: Offsets
) -> SnapshotVersion | None:
    """Return the newest snapshot that knows nothing of these tenants from before these orders, and after which the log
    has every message; None without one.

    The log shows what it still holds of a tenant. What it held before, the snapshot says: it has the tenants whose
    records went through, and its optimizer, as long as its resume part is kept. The base drafter knows nobody.

    Args:
        orders: to forget a tenant, by tenant: all that hold.
        log_id: the log's identity.
        firsts: the log's first offsets.

    Raises:
        RegistryError: it cannot be reached.
    """
    versions = registry.versions()
    if versions and versions[-1].manifest.log_id not in (None, log_id):
        return None
    for each in reversed(versions):
        manifest = each.manifest
        is_whole = all(first <= manifest.offsets.get(partition, 0) for partition, first in firsts.items())
        pending = {tenant: order for tenant, order in orders.items() if order.id not in manifest.forgets}
        if not is_whole or manifest.log_id not in (None, log_id):
            continue
        if any(order.concerns(manifest) for order in pending.values()):
            continue
        if manifest.train == "base" or not _may_know(registry, each, pending):
            return each
    return None


def _may_know(registry: Registry, version: SnapshotVersion, tenants: Iterable[str]) -> bool:
    """Return whether records of one of these tenants may have gone through before this snapshot."""
    if "resume" not in bundle.parts_of(version.manifest, version.removed_parts):
        return True
    with tempfile.TemporaryDirectory(prefix="omnidraft-resume-") as folder:
        try:
            fetched = registry.fetch(version.version, Path(folder), ("resume",))
            known = bundle.tensors(fetched, BATCHER)[TENANTS].tolist()
            return not {ANYBODY, *map(hash_63, tenants)}.isdisjoint(known)
        except (SnapshotCorrupt, SnapshotNotFound) as exc:
            logger.warning("learning cannot start from snapshot %d: %s", version.version, exc)
            return True
