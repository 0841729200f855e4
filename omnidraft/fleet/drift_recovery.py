"""The reaction to drift: announce it, roll back to a better snapshot, announce its end.

The cheapest measure comes first: the announcement alone makes workers draft less for this tenant; a fall that came
with the first requests of a snapshot rolls back to the one before; otherwise the distiller announces which earlier
snapshot agrees best with the new traffic, and publishes more often until the drift is over. Every step is recorded on
the control log, as an annotation of the champion, and in the process's log. After a restart the newest traffic is read
again to restore the levels; changes in it were handled before the restart and are not handled twice.
"""

import logging

from omnidraft.errors import SnapshotNotFound, SnapshotStale
from omnidraft.fleet.drift import DriftChange, DriftDetector
from omnidraft.fleet.request_stats import RequestStats
from omnidraft.ports import Announcement, Announcer, Metrics, Registry

logger = logging.getLogger(__name__)


class DriftRecovery:
    """Handles the drifts of one pair."""

    def __init__(
        self,
        registry: Registry,
        announcer: Announcer,
        detector: DriftDetector,
        metrics: Metrics,
        *,
        target: str,
    ) -> None:
        self._registry, self._announcer, self._detector = registry, announcer, detector
        self._metrics, self._target = metrics, target

    def update(self, request: RequestStats) -> None:
        """Add one request and react to the change it reveals. Raises SnapshotError, BusError."""
        change = self._detector.update(request)
        if change is None or request.is_past:
            return
        logger.warning("%s: %s: %s", self._target, change.kind, change)
        self._announcer.publish(change.kind, tenant=change.tenant, reason=str(change))
        counter = "omnidraft_drift_alarms_total" if change.kind == "drift" else "omnidraft_drifts_over_total"
        self._metrics.add(counter, target=self._target)  # tenants are too many to be labels
        self._annotate(change)
        if change.suspect is not None:
            self._roll_back(change.suspect, str(change))

    def on_announcement(self, announcement: Announcement) -> None:
        """Promote the version announced as `best` by the distiller, unless the drift is over. Raises SnapshotError."""
        version, tenant = announcement.version, announcement.tenant or ""
        if announcement.kind != "best" or version is None or not self._detector.is_drifting(tenant):
            return
        fence = announcement.fence or self._registry.fence()
        if self._registry.resolve("champion").version != version:
            self._promote(version, announcement.reason or "agrees best with the traffic that drifted", fence)

    def _annotate(self, change: DriftChange) -> None:
        try:
            champion = self._registry.resolve("champion").version
        except SnapshotNotFound:
            return
        self._registry.annotate(champion, {change.kind: str(change)})
        name = "drift_alarm" if change.kind == "drift" else "drift_over"
        self._registry.log_metrics(champion, {name: 1.0, "agreement_served": change.recent}, champion)

    def _roll_back(self, suspect: int, reason: str) -> None:
        """Roll back from a champion that was bad from its first requests on to the one before."""
        fence = self._registry.fence()
        try:
            previous = self._registry.resolve("previous").version
        except SnapshotNotFound:
            return
        if self._registry.resolve("champion").version == suspect:
            self._promote(previous, reason, fence)

    def _promote(self, version: int, reason: str, fence: str) -> None:
        """Make it the champion; the controller announces every champion."""
        try:
            self._registry.promote_unless_changed(version, fence)
        except SnapshotStale as exc:
            logger.warning("%s: not back to snapshot %d: %s", self._target, version, exc)
            return
        self._registry.annotate(version, {"judgement": f"promoted again: {reason}"})
        logger.warning("%s: back to snapshot %d: %s", self._target, version, reason)
