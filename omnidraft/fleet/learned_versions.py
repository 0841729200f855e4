"""What each version of a drafter was measured to have learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omnidraft.ports import SnapshotVersion

MOST_VERSIONS = 200
"""The number of newest versions that are told one by one."""


@dataclass(frozen=True, slots=True)
class LearnedVersion:
    """A version and its measurements."""

    version: int
    aliases: tuple[str, ...]
    created_ms: int
    num_records: int
    agreement_before: float | None
    """Held-out agreement, like agreement_after."""
    agreement_after: float | None
    change_error: float | None
    """Standard error of agreement_after - agreement_before."""
    losses: Mapping[str, float]
    judgement: str | None
    """What the controller decided about it, and why; None: nothing yet."""


def learned_versions(versions: Sequence[SnapshotVersion]) -> tuple[LearnedVersion, ...]:
    """Return the newest MOST_VERSIONS, oldest first."""
    return tuple(_learned_version(each) for each in versions[-MOST_VERSIONS:])


def _learned_version(version: SnapshotVersion) -> LearnedVersion:
    of = version.manifest
    return LearnedVersion(
        version.version,
        version.aliases,
        version.created_ms,
        of.num_records,
        of.agreement_before,
        of.agreement_after,
        of.agreement_change_error,
        of.losses,
        version.judgement,
    )
