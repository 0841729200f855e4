"""How long the parts of old snapshots are kept. Manifests stay: the gate sums the changes from the champion on.

Users' text goes first, weights later. Weights that an alias names stay: the champion's serve, a rollback goes to the
previous champion's, and the challenger's wait for their judgement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omnidraft.ports import SnapshotVersion
from omnidraft.snapshots.bundle import ALL_PARTS, PRUNED_PARTS, parts_of

ALL_EVERY = 200
"""In one of so many publications all versions are looked at, not the newest alone."""


def superseded(versions: Sequence[SnapshotVersion], keep: int) -> list[SnapshotVersion]:
    """Return the versions, oldest first, that no alias names and that are older than the `keep` newest."""
    return [each for each in versions[:-keep] if not each.aliases]


@dataclass(frozen=True, slots=True)
class Retention:
    """The numbers of newest versions that keep all of their parts."""

    keep_resume: int
    """Versions that keep their resume part and memory; so does the champion."""
    keep_serving: int | None = None
    """Versions that keep their weights, at least `keep_resume`; so do those with an alias. None: all keep them."""

    def num_examined(self, publication: int) -> int | None:
        """Return the number of newest versions to look at after a process's publication of this number, None for all:
        first, since settings may have changed, and now and then, since an old version may have lost its alias."""
        return max(self.keep_resume, self.keep_serving or 0) + ALL_EVERY if publication % ALL_EVERY else None

    def removable(self, versions: Sequence[SnapshotVersion]) -> Iterator[tuple[SnapshotVersion, tuple[str, ...]]]:
        """Yield the versions, oldest first, with those of their parts that are to be deleted and still there."""
        keep = None if self.keep_serving is None else max(self.keep_serving, self.keep_resume)
        without_weights = set() if keep is None else {each.version for each in superseded(versions, keep)}
        for each in versions[: -self.keep_resume]:
            unwanted = ALL_PARTS if each.version in without_weights else PRUNED_PARTS
            present = parts_of(each.manifest, each.removed_parts)
            parts = tuple(part for part in unwanted if part in present)
            if parts and "champion" not in each.aliases:
                yield each, parts
