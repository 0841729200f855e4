"""An operator's orders: which version serves, and whether a pair learns."""

from contextlib import suppress

from omnidraft.errors import BusError, OmnidraftError, SnapshotError
from omnidraft.fleet.challengers import BY_OPERATOR, PROMOTING, is_undecided
from omnidraft.ports import JUDGEMENT, Champion, ControlWriter, Registry, SnapshotVersion
from omnidraft.snapshots.manifest import digest


def promote(registry: Registry, control: ControlWriter, name: str) -> SnapshotVersion:
    """Make a version, by number or alias, the champion on every worker, and return it.

    Raises:
        SnapshotNotFound: there is none of this name.
        RegistryError: the registry does not answer.
        ConfigError: versions have to be signed, and there is no key for that.
        BusError: the version is the champion, and the log does not answer.
    """
    chosen = registry.resolve(name)
    is_waiting = chosen.is_servable and is_undecided(chosen.judgement)
    if is_waiting:
        # before the promotion, so that no controller ever takes it for one that waits, once another is champion
        registry.annotate(chosen.version, {JUDGEMENT: BY_OPERATOR})
    try:
        registry.promote(chosen.version)
    except OmnidraftError:
        if is_waiting:  # so it still does
            with suppress(SnapshotError):
                registry.annotate(chosen.version, {JUDGEMENT: chosen.judgement or PROMOTING})
        raise
    try:
        control.put(("champion",), Champion(version=chosen.version, digest=digest(chosen.manifest)))
    except BusError as exc:
        raise BusError(f"version {chosen.version} is the champion, but it cannot be announced: {exc}") from exc
    return chosen
