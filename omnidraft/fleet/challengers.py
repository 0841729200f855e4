"""Finds the version that waits for judgement.

Its publisher calls it `challenger`. The newest version may lack that alias, and any decision: its publisher was killed
before, or a promotion in MLflow deleted the alias of the version before at the same moment. One that is catching up
waits for nothing: its successors have learned more.
"""

import time
from collections.abc import Callable

from omnidraft.errors import SnapshotNotFound
from omnidraft.ports import SnapshotReader, SnapshotVersion

UNNAMED_S = 60.0
"""The age from which a version without an alias is taken for one whose publisher died; and the seconds between two
looks for one, each of which lists versions."""
ABANDONED_S = 86_400.0
"""The age from which such a version is left: its notes may be those of a registry that was restored."""


def find_version(registry: SnapshotReader, name: str | int) -> SnapshotVersion | None:
    """Return the version with this number or alias, or the `latest`; None without one. Raises as `resolve` does."""
    try:
        return registry.resolve(str(name))
    except SnapshotNotFound:
        return None


def is_open(version: SnapshotVersion) -> bool:
    """Return whether nothing final was decided about it."""
    return version.judgement is None or not version.judgement.is_final


class Challengers:
    """Finds the challenger of one pair."""

    def __init__(self, registry: SnapshotReader, clock: Callable[[], float]) -> None:
        self._registry, self._clock = registry, clock
        self._next_look_s = float("-inf")

    def find(self) -> SnapshotVersion | None:
        """Return the version that is to be judged, if there is one."""
        named = find_version(self._registry, "challenger")
        if named is not None and is_open(named):
            return None if named.manifest.catching_up_to else named
        if self._clock() < self._next_look_s:
            return None
        latest = find_version(self._registry, "latest")
        if latest is not None and _is_unnamed(latest):
            return latest
        self._next_look_s = self._clock() + UNNAMED_S
        return None


def _is_unnamed(version: SnapshotVersion) -> bool:
    """Return whether nobody named or decided about a version that is old enough for that."""
    age_s = time.time() - version.created_ms / 1000
    is_left = not version.aliases and is_open(version) and UNNAMED_S < age_s < ABANDONED_S
    return is_left and version.is_servable and not version.manifest.catching_up_to
