"""Finds the version that waits for judgement.

Its publisher calls it `challenger`. The newest version may lack that alias, and any judgement: its publisher was killed
before, or a promotion in MLflow deleted the alias of the version before at the same moment.
"""

import time
from collections.abc import Callable

from omnidraft.errors import SnapshotNotFound
from omnidraft.ports import SnapshotReader, SnapshotVersion

UNNAMED_S = 60.0
"""The age from which a version without an alias is taken for one whose publisher died; and the seconds between two
looks for one, each of which lists versions."""


class Challengers:
    """Finds the challenger of one pair."""

    def __init__(self, registry: SnapshotReader, clock: Callable[[], float]) -> None:
        self._registry, self._clock = registry, clock
        self._next_look_s = float("-inf")
        self._overtaken: int | None = None
        """The judged version that was still `challenger` when a newer one was found."""

    def find(self) -> SnapshotVersion | None:
        """Return the version to judge, if there is any; it may have been judged already."""
        named = self._resolve("challenger")
        if named is not None and named.version == self._overtaken:
            named = None
        if (named is not None and named.judgement is None) or self._clock() < self._next_look_s:
            return named
        latest = self._resolve("latest")
        if latest is None or not _is_unnamed(latest):
            self._next_look_s = self._clock() + UNNAMED_S
            return named
        if named is not None:
            self._overtaken = named.version
        return latest

    def _resolve(self, name: str) -> SnapshotVersion | None:
        try:
            return self._registry.resolve(name)
        except SnapshotNotFound:
            return None


def _is_unnamed(version: SnapshotVersion) -> bool:
    """Return whether nobody named, judged or promoted a version that is old enough for that."""
    is_unknown = not version.aliases and version.judgement is None and version.statement is None
    return is_unknown and version.is_servable and time.time() - version.created_ms / 1000 > UNNAMED_S
