"""Orders to forget a tenant, and which snapshots were made before one was carried out."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.errors import RegistryError, SnapshotError
from omnidraft.fleet.challengers import find_version
from omnidraft.fleet.control_log import ControlLog
from omnidraft.ports import Forget, Offsets, Registry, SnapshotVersion
from omnidraft.snapshots.bundle import ALL_PARTS, PRUNED_PARTS, parts_of


def order_forgetting(control: ControlLog, tenant: str, newest_ms: int, first_offsets: Offsets) -> Forget:
    """Order every distiller and worker to forget what it has of this tenant; return the order.

    Args:
        newest_ms: the time of the tenant's newest record. The order reaches up to it, even if the clock of the worker
            that made it was ahead of ours, and up to where the last one did.
        first_offsets: see Forget.

    Raises:
        BusError: the log cannot be written.
    """
    last = control.read_whole().forget(tenant)
    until_ms = max(time.time_ns() // 1_000_000, newest_ms, last.until_ms if last else 0)
    before = last.exact if last else None
    order = Forget(id=uuid.uuid4().hex[:12], until_ms=until_ms, first_offsets=first_offsets, before=before)
    control.put(("forget", tenant), order)
    return order


@dataclass(frozen=True, slots=True)
class AffectedSnapshots:
    """The versions of one pair, by what they may hold of a forgotten tenant."""

    affected: tuple[SnapshotVersion, ...]
    """Learned from the tenant's records, and published before the order was carried out: their n-gram caches counted
    the tenant's n-grams, and their resume parts and memories may have its records."""
    is_newest_clean: bool
    """Whether the order was carried out in the newest version."""
    is_catching_up: bool
    """Whether the log is being learned again, so that the newest version is no champion yet."""
    with_private_parts: tuple[SnapshotVersion, ...] = ()
    """The others from before the order was carried out whose resume parts or memories are still there: these may have
    records and texts that the log lost since."""


def affected_snapshots(
    versions: Sequence[SnapshotVersion], first_offsets: Offsets, forget_id: str
) -> AffectedSnapshots:
    """Sort the versions of a pair.

    Args:
        versions: oldest first.
        first_offsets: partition -> offset of the tenant's first record.
        forget_id: the newest order to forget the tenant.
    """
    order = Forget(id=forget_id, until_ms=0, first_offsets=first_offsets)
    affected = [each for each in versions if order.concerns(each.manifest)]
    is_newest_clean = not versions or forget_id in versions[-1].manifest.forgets
    with_private_parts = [
        each
        for each in versions
        if _has_private_parts(each) and forget_id not in each.manifest.forgets and each not in affected
    ]
    is_catching_up = bool(versions and versions[-1].manifest.catching_up_to)
    return AffectedSnapshots(tuple(affected), is_newest_clean, is_catching_up, tuple(with_private_parts))


def purge(registry: Registry, snapshots: AffectedSnapshots, newest: int) -> list[int]:
    """Delete the files of affected versions, all but the newest one's and the weights of the champion, and the resume
    parts and memories of all others from before the order; return the versions that lost their weights.

    Raises:
        RegistryError: some could not be deleted, which it names; the others were.
        SnapshotError: the registry cannot be reached.
    """
    champion = _champion(registry)
    parts: dict[int, tuple[str, ...]]
    parts = {each.version: PRUNED_PARTS if each.version == champion else ALL_PARTS for each in snapshots.affected}
    parts |= {each.version: PRUNED_PARTS for each in snapshots.with_private_parts}
    parts.pop(newest, None)
    failures = []
    for version, of_version in parts.items():
        try:
            registry.remove_files(version, of_version)
        except SnapshotError as exc:
            failures.append(f"version {version}: {exc}")
            _champion(registry)  # raises where nothing answers any more
    if failures:
        what = f"files of {len(failures)} of {len(parts)} versions were not deleted"
        raise RegistryError(f"{what}, the others were; purge again when the cause is mended: {'; '.join(failures)}")
    return [each.version for each in snapshots.affected if each.version not in (newest, champion)]


def _has_private_parts(version: SnapshotVersion) -> bool:
    return not set(parts_of(version.manifest, version.removed_parts)).isdisjoint(PRUNED_PARTS)


def _champion(registry: Registry) -> int | None:
    champion = find_version(registry, "champion")
    return None if champion is None else champion.version
