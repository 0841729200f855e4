"""The registry: versions of the drafter and their aliases, `champion` among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omnidraft.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class SnapshotVersion:
    """A snapshot as the registry knows it."""

    version: int
    manifest: Manifest
    aliases: tuple[str, ...]
    created_ms: int


class Registry(Protocol):
    """Versions and aliases of the snapshots of one (drafter, target) pair. Safe for several processes."""

    def publish(self, bundle: Path, parent: int | None) -> SnapshotVersion:
        """Add a snapshot folder as the next version and point `challenger` at it. `parent` is the newest version that
        the publisher knows.

        Raises:
            SnapshotStale: somebody published since.
            SnapshotCorrupt: a file of the bundle does not match its manifest.
            RegistryError: refused or cannot be reached.
        """

    def versions(self) -> tuple[SnapshotVersion, ...]:
        """All, oldest first."""

    def resolve(self, name: str) -> SnapshotVersion:
        """By alias (champion, challenger, previous), `latest` or version number. Raises SnapshotNotFound."""

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        """A local snapshot folder with these parts, checksums verified. Raises SnapshotNotFound, SnapshotCorrupt."""

    def promote(self, version: int) -> None:
        """`champion` moves here, and `previous` to where it was; a challenger that became champion is no longer
        `challenger`, so that a rollback is not undone. Promoting the champion again moves nothing. It is the operator's
        word: every fence from before it is void."""

    def fence(self) -> str:
        """Changes whenever an operator promotes and whenever the champion becomes another. It is taken before what a
        decision rests on is read."""

    def promote_unless_changed(self, version: int, fence: str) -> None:
        """As `promote`, for a decision that was made since this fence was taken.

        Raises:
            SnapshotStale: an operator promoted since, or the champion is another; the decision is void.
        """

    def annotate(self, version: int, notes: Mapping[str, str]) -> None:
        """Short texts shown beside this version, for example why it was promoted; the last one of a name holds."""

    def log_metrics(self, version: int, metrics: Mapping[str, float], step: int) -> None:
        """A point of each curve of this version."""

    def log_file(self, version: int, path: Path) -> None:
        """A picture or report that belongs to this version."""
