"""Finds the version that waits for judgement.

Its publisher calls it `challenger`. The newest version may lack that alias, and any decision: its publisher was killed
before, or a promotion in MLflow deleted the alias of the version before at the same moment.
"""

import time
from collections.abc import Callable

from omnidraft.errors import SnapshotNotFound
from omnidraft.ports import VOID, SnapshotReader, SnapshotVersion

CANARY = "canary at"
"""It was tried on live requests when this was written; the share follows."""
PROMOTING = "promoting"
"""It is to become champion and, as far as is known, has not."""
PROMOTED = "promoted"
"""It became champion."""
REFUSED = "refused"
"""It was measured, or tried on live requests, and does not become champion; the reason follows."""
BY_OPERATOR = f"{PROMOTED} by an operator"


def is_undecided(judgement: str | None) -> bool:
    """Return whether a version still waits: it has no judgement, or one that was not carried out to its end."""
    return judgement is None or judgement.startswith((CANARY, PROMOTING))


def was_only_canary(version: SnapshotVersion) -> bool:
    """Return whether requests that it served were a canary's, as far as is known: it was tried, and is no champion."""
    is_tried = (version.judgement or "").startswith((CANARY, f"{REFUSED}: canary", VOID))
    return is_tried and not {"champion", "previous"} & set(version.aliases)


def find_version(registry: SnapshotReader, name: str) -> SnapshotVersion | None:
    """Return the version with this number or alias, or the `latest`; None without one. Raises as `resolve` does."""
    try:
        return registry.resolve(name)
    except SnapshotNotFound:
        return None


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
    is_unknown = not version.aliases and is_undecided(version.judgement)
    age_s = time.time() - version.created_ms / 1000
    return is_unknown and version.is_servable and UNNAMED_S < age_s < ABANDONED_S
