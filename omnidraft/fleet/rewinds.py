"""Orders learning back to the champion once many challengers in a row were worse than it."""

import logging

from omnidraft.fleet.promotion import Decision
from omnidraft.fleet.version_lookup import find_version
from omnidraft.ports import Announcer, SnapshotReader

logger = logging.getLogger(__name__)

REWIND_AFTER = 6
"""Challengers in a row that were worse than the champion, after which learning goes back to its weights and optimizer,
and on from its own place in the log."""


class Rewinds:
    """Counts the challengers of one pair that were worse, since this process started."""

    def __init__(
        self, registry: SnapshotReader, announcer: Announcer, target: str, limit: int | None = REWIND_AFTER
    ) -> None:
        """Give the order after `limit` challengers, never if that is None."""
        self._registry, self._announcer, self._limit, self._target = registry, announcer, limit, target
        self._worse: frozenset[int] = frozenset()

    def count(self, version: int, decision: Decision) -> None:
        """Count a decision, and give the order if it is due. A challenger that an operator published again is none of
        those that were worse, and no refusal from before it counts."""
        challenger = self._registry.resolve(str(version)).manifest if decision.is_worse else None
        if challenger is None or challenger.is_republished:
            self._worse = frozenset()
            return
        self._worse |= {version}  # one judged again counts once
        if self._limit is None or len(self._worse) < self._limit:
            return
        if (champion := find_version(self._registry, "champion")) is None:
            return
        reason = f"{len(self._worse)} challengers in a row were worse than champion {champion.version}"
        self._announcer.publish("rewind", champion.version, restart_id=challenger.snapshot_id, reason=reason)
        self._worse = frozenset()
        logger.warning("%s: learning goes back to champion %d: %s", self._target, champion.version, reason)
