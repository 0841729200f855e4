"""Finds the version that waits for judgement.

Its publisher calls it `challenger`. The newest version may lack that alias, and any decision: its publisher was killed
before, or a promotion in MLflow deleted the alias of the version before at the same moment.
"""

import time
from collections.abc import Callable

from omnidraft.fleet.judgements import is_undecided
from omnidraft.fleet.version_lookup import find_version
from omnidraft.ports import SnapshotReader, SnapshotVersion

UNNAMED_S = 60.0
"""The age from which a version without an alias is taken for one whose publisher died; and the seconds between two
looks for one, each of which lists versions."""
ABANDONED_S = 86_400.0
"""The age from which such a version is left: an operator may have promoted another instead, with no note of it."""


class Challengers:
    """Finds the challenger of one pair."""

    def __init__(self, registry: SnapshotReader, clock: Callable[[], float]) -> None:
        self._registry, self._clock = registry, clock
        self._next_look_s = float("-inf")
        self._overtaken: int | None = None
        """The judged version that was still `challenger` when there was a newer one."""

    def find(self) -> SnapshotVersion | None:
        """Return the version to judge, if there is any; it may have been judged already."""
        named = find_version(self._registry, "challenger")
        if named is not None and named.version == self._overtaken:
            named = None
        if (named is not None and named.judgement is None) or self._clock() < self._next_look_s:
            return named
        latest = find_version(self._registry, "latest")
        if named is not None and latest is not None and latest.version > named.version:
            self._overtaken, named = named.version, None
        if latest is not None and _is_unnamed(latest):
            return latest
        self._next_look_s = self._clock() + UNNAMED_S
        return named


def _is_unnamed(version: SnapshotVersion) -> bool:
    """Return whether nobody named, promoted or decided about a version that is old enough for that."""
    is_unknown = not version.aliases and is_undecided(version.judgement) and version.statement is None
    age_s = time.time() - version.created_ms / 1000
    return is_unknown and version.is_servable and UNNAMED_S < age_s < ABANDONED_S
