"""What is done when agreement falls: say so, go back to a snapshot that was better, say when it is over.

Cheapest first: workers draft less for this tenant at once, by the announcement alone; a fall that came with the first
requests of a snapshot brings the one before it back; else the distiller says which earlier snapshot agrees best with
the new traffic, and learns faster until it is over. Every step is on the control log, at the champion in the registry
and in the log. After a restart the newest traffic is read again, so that falls are told from what was before; what it
showed was answered then, and is not answered twice.
"""

import logging

from omnidraft.errors import SnapshotNotFound, SnapshotStale
from omnidraft.fleet.drift import Change, DriftDetector
from omnidraft.fleet.request_stats import RequestStats
from omnidraft.ports import Announcement, Announcer, Metrics, Registry

logger = logging.getLogger(__name__)


class DriftRecovery:
    """Of one pair."""

    def __init__(
        self,
        registry: Registry,
        announcer: Announcer,
        watch: DriftDetector,
        metrics: Metrics,
        *,
        target: str,
    ) -> None:
        self._registry, self._announcer, self._watch = registry, announcer, watch
        self._metrics, self._target = metrics, target

    def update(self, request: RequestStats) -> None:
        """One more request. Raises SnapshotError, BusError."""
        change = self._watch.update(request)
        if change is None or request.is_past:
            return
        logger.warning("%s: %s: %s", self._target, change.kind, change)
        self._announcer.publish(change.kind, tenant=change.tenant, reason=str(change))
        counter = "omnidraft_drift_alarms_total" if change.kind == "drift" else "omnidraft_drifts_over_total"
        self._metrics.add(counter, target=self._target)  # tenants are too many to be labels
        self._note(change)
        if change.suspect is not None:
            self._go_back(change.suspect, str(change))

    def on_announcement(self, told: Announcement) -> None:
        """The distiller's `best`; too late when the drift is over. Raises SnapshotError."""
        if told.kind != "best" or told.version is None or not self._watch.is_drifting(told.tenant or ""):
            return
        fence = told.fence or self._registry.fence()
        if self._registry.resolve("champion").version != told.version:
            self._promote(told.version, told.reason or "agrees best with the traffic that drifted", fence)

    def _note(self, change: Change) -> None:
        try:
            champion = self._registry.resolve("champion").version
        except SnapshotNotFound:
            return
        self._registry.annotate(champion, {change.kind: str(change)})
        name = "drift_alarm" if change.kind == "drift" else "drift_over"
        self._registry.log_metrics(champion, {name: 1.0, "agreement_served": change.recent}, champion)

    def _go_back(self, suspect: int, reason: str) -> None:
        """From a champion that was bad from its first requests on to the one before."""
        fence = self._registry.fence()
        try:
            previous = self._registry.resolve("previous").version
        except SnapshotNotFound:
            return
        if self._registry.resolve("champion").version == suspect:
            self._promote(previous, reason, fence)

    def _promote(self, version: int, reason: str, fence: str) -> None:
        """The controller announces it, as it does every champion."""
        try:
            self._registry.promote_unless_changed(version, fence)
        except SnapshotStale as exc:
            logger.warning("%s: not back to snapshot %d: %s", self._target, version, exc)
            return
        self._registry.annotate(version, {"judgement": f"promoted again: {reason}"})
        logger.warning("%s: back to snapshot %d: %s", self._target, version, reason)
