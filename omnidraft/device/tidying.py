"""Keeps a home small: weights that nobody goes back to are deleted, and so are records that were learned.

What stays of an old version is its manifest, a few kB: the gate sums the changes from the champion on.
"""

from collections.abc import Callable

from omnidraft.ports import Offsets, Registry
from omnidraft.registry.retention import superseded
from omnidraft.snapshots.memory_part import ALL_PARTS


class Tidier:
    """Tidies one registry and its log, from one thread."""

    def __init__(self, registry: Registry, delete_before: Callable[[Offsets], None], *, keep: int) -> None:
        """
        Args:
            delete_before: deletes the records before these offsets of the log.
            keep: the number of newest versions that learning can go on from, should the newest be damaged.
        """
        self._registry, self._delete_before, self._keep = registry, delete_before, keep
        self._removed: set[int] = set()

    def tidy(self) -> None:
        """Delete what neither serving nor learning needs any more. Raises RegistryError, BusError."""
        versions = self._registry.versions()
        newest = versions[-self._keep :]
        for each in superseded(versions, self._keep):
            if each.version not in self._removed:
                self._registry.remove_files(each.version, ALL_PARTS)
                self._removed.add(each.version)
        if len(newest) == self._keep:
            known = [each.manifest.offsets for each in newest]
            learned = {partition: min(each.get(partition, 0) for each in known) for partition in known[-1]}
            self._delete_before(learned)
