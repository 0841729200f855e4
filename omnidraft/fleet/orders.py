"""An operator's orders: which version serves, and whether a pair learns."""

from omnidraft.fleet.control_log import publish_announcement
from omnidraft.ports import LogWriter, Registry, SnapshotVersion
from omnidraft.snapshots.manifest import digest


def promote(registry: Registry, control: LogWriter, name: str, *, target: str, drafter: str) -> SnapshotVersion:
    """Make a version, by number or alias, the champion on every worker, and return it.

    Raises:
        SnapshotNotFound: there is none of this name.
        RegistryError, BusError: registry or log do not answer.
    """
    chosen = registry.resolve(name)
    registry.promote(chosen.version)
    publish_announcement(
        control, "champion", chosen.version, target=target, drafter=drafter, digest=digest(chosen.manifest)
    )
    return chosen
