"""How long the parts of old snapshots are kept. Manifests stay: the gate sums the changes from the champion on.

Users' text goes first, weights later. Weights that an alias names stay: the champion's serve, a rollback goes to the
previous champion's, and the challenger's wait for their judgement.
"""

from collections.abc import Iterator, Sequence

from omnidraft.ports import SnapshotVersion
from omnidraft.snapshots.bundle import ALL_PARTS, PRUNED_PARTS, parts_of

ALL_EVERY = 200
"""In one of so many publications all versions are looked at, not the newest alone."""


def superseded(versions: Sequence[SnapshotVersion], keep: int) -> list[SnapshotVersion]:
    """Return the versions, oldest first, that no alias names and that are older than the `keep` newest."""
    return [each for each in versions[:-keep] if not each.aliases]


class Retention:
    """Which parts one process deletes after its publications."""

    def __init__(self, keep_resume: int, keep_serving: int | None = None) -> None:
        """
        Args:
            keep_resume: newest versions that keep their resume part and memory; so does the champion.
            keep_serving: newest versions that keep their weights, as do those with a resume part or an alias. None:
                all keep them.
        """
        self._keep_resume, self._keep_serving = keep_resume, keep_serving
        self._num_publications = 0

    def next_examined(self) -> int | None:
        """Return the number of newest versions to look at after the next publication, None for all: first, since
        settings may have changed, and now and then, since an old version may have lost its alias."""
        is_whole = self._num_publications % ALL_EVERY == 0
        self._num_publications += 1
        return None if is_whole else max(self._keep_resume, self._keep_serving or 0) + ALL_EVERY

    def removable(self, versions: Sequence[SnapshotVersion]) -> Iterator[tuple[SnapshotVersion, tuple[str, ...]]]:
        """Yield the versions, oldest first, with those of their parts that are to be deleted and still there."""
        keep = self._keep_serving
        without_weights = set() if keep is None else {each.version for each in superseded(versions, keep)}
        for each in versions[: -self._keep_resume]:
            unwanted = ALL_PARTS if each.version in without_weights else PRUNED_PARTS
            present = parts_of(each.manifest, each.removed_parts)
            parts = tuple(part for part in unwanted if part in present)
            if parts and "champion" not in each.aliases:
                yield each, parts
