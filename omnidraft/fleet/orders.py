"""An operator's orders: which version serves, and whether a pair learns."""

from collections.abc import Callable
from contextlib import closing, suppress

from omnidraft.errors import BusError, OmnidraftError, SnapshotError
from omnidraft.fleet.challengers import BY_OPERATOR, PROMOTING, is_undecided
from omnidraft.fleet.control_log import publish_announcement
from omnidraft.ports import JUDGEMENT, LogWriter, Registry, SnapshotVersion
from omnidraft.snapshots.manifest import digest


def promote(
    registry: Registry, open_control: Callable[[], LogWriter], name: str, *, target: str, drafter: str
) -> SnapshotVersion:
    """Make a version, by number or alias, the champion on every worker, and return it.

    Args:
        open_control: opens the control log, after the alias has moved: workers look at that too, so a promotion takes
            place while the log is away, though later.

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
        with closing(open_control()) as control:
            publish_announcement(
                control, "champion", chosen.version, target=target, drafter=drafter, digest=digest(chosen.manifest)
            )
    except BusError as exc:
        raise BusError(f"version {chosen.version} is the champion, but it cannot be announced: {exc}") from exc
    return chosen
