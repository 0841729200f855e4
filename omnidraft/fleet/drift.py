"""Drift: for each tenant and kind of request a change detector over agreement, and the reaction to a fall.

Drafts of text under a grammar agree more often than those of free text, so that without the kind a change of the mix
would look like a drift, and the gains of one kind would hide the losses of another. A stream's values are agreements
over equally many target passes, so that short requests are no noisier than long ones. A rise is no drift: it only sets
a new level. The test is Page's (Biometrika 41, 1954) with Hinkley's running mean; ADWIN needs several times as many
values for the same fall. See docs/algorithms.md, section 9.

The cheapest measure comes first: the announcement alone makes workers draft less for this traffic; a fall that came
with the first requests of a snapshot rolls back to the one before; otherwise the distiller announces which earlier
snapshot agrees best with the new traffic, and publishes more often until the drift is over. No snapshot returns by
which other tenants lose (return_check.py). Every step is recorded on the control log, as an annotation of the champion,
and in the process's log. After a restart the newest traffic is read again to restore the levels; changes in it were
handled before the restart and are not handled twice.
"""

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal, get_args

from omnidraft.config import ControllerSettings, DriftSettings
from omnidraft.errors import SnapshotNotFound, SnapshotStale
from omnidraft.fleet.promotion import signed_versions
from omnidraft.fleet.request_stats import RequestStats
from omnidraft.fleet.return_check import objection
from omnidraft.ports import JUDGEMENT, Announcement, Announcer, ChampionStatements, Metrics, Registry, Work

if TYPE_CHECKING:
    from river.drift import PageHinkley


RECENT = 10
"""The number of newest values whose mean is the present agreement."""
NEW_SNAPSHOT = 30
"""The number of values after a swap in which a fall is attributed to the snapshot."""
MOST_STREAMS = 1000
_OF_WORK: dict[Work, str] = {"text": "", "constrained": " under grammars", "tools": " with tools"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriftChange:
    """The beginning or end of a drift of one tenant's agreement, for requests of one kind."""

    tenant: str
    work: Work
    kind: Literal["drift", "drift_over"]
    level: float
    """The mean agreement before the fall."""
    recent: float
    """The mean agreement now."""
    num_values: int
    """The number of values since the level began, for a drift; since the fall, for its end."""
    suspect: int | None = None
    """The snapshot whose first requests these were; None when the drafter was the same before and after."""

    def __str__(self) -> str:
        verb = "fell" if self.kind == "drift" else "was back" if self.recent >= self.level else "stayed"
        why = f", with the first requests of snapshot {self.suspect}" if self.suspect is not None else ""
        name = self.tenant if self.tenant.isprintable() else repr(self.tenant)  # it may be whatever a request said
        traffic = name + _OF_WORK[self.work]
        return (
            f"agreement of {traffic} {verb}: {self.level:.3f} before, {self.recent:.3f} over the last {RECENT} of "
            f"{self.num_values} values{why}"
        )


class AgreementStream:
    """The values of one tenant's agreement for requests of one kind."""

    def __init__(self, tenant: str, settings: DriftSettings, work: Work = "text") -> None:
        self._tenant, self._work, self._settings = tenant, work, settings
        self._version: int | None = None
        self._since_swap: deque[float] = deque(maxlen=NEW_SNAPSHOT + 1)
        self._num_agreed = self._num_drafted = 0
        self._has_changed_version = False
        self._fell_from: float | None = None
        self._reset()

    @property
    def is_drifting(self) -> bool:
        return self._fell_from is not None

    def update(self, request: RequestStats) -> DriftChange | None:
        """Add one request; return the change that it reveals, if any."""
        self._num_agreed += request.num_agreed
        self._num_drafted += request.num_drafted
        if self._num_drafted < self._settings.passes_per_value:
            return None
        agreement = self._num_agreed / self._num_drafted
        self._num_agreed = self._num_drafted = 0
        return self._add_value(agreement, request.version)

    def _add_value(self, agreement: float, version: int | None) -> DriftChange | None:
        self._note_version(version)
        self._since_swap.append(agreement)
        if len(self._recent) == RECENT:
            self._num_before += 1
            self._sum_before += self._recent[0]
        self._recent.append(agreement)
        return self._detect_fall(agreement) if self._fell_from is None else self._detect_end(self._fell_from)

    def _detect_fall(self, agreement: float) -> DriftChange | None:
        self._detector.update(agreement)
        if not self._detector.drift_detected or not self._num_before:
            return None
        level, recent = self._sum_before / self._num_before, fmean(self._recent)
        num_values = self._num_before + len(self._recent)
        self._reset()
        if recent >= level:
            return None
        self._fell_from = level
        suspect = self._version if self._came_with_the_snapshot(level, recent) else None
        return DriftChange(self._tenant, self._work, "drift", level, recent, num_values, suspect)

    def _came_with_the_snapshot(self, level: float, recent: float) -> bool:
        """Return whether the snapshot's first values were as low as the present ones. One that served well at first is
        not the cause."""
        if not self._has_changed_version or len(self._since_swap) > NEW_SNAPSHOT:
            return False
        first = list(self._since_swap)[:-RECENT]
        return not first or fmean(first) < (level + recent) / 2

    def _detect_end(self, level: float) -> DriftChange | None:
        recent, num_values = fmean(self._recent), self._num_before + len(self._recent)
        is_back = len(self._recent) == RECENT and recent >= self._settings.recovered_share * level
        if not is_back and num_values < self._settings.settled_values:
            return None
        self._fell_from = None
        self._reset()
        return DriftChange(self._tenant, self._work, "drift_over", level, recent, num_values)

    def _reset(self) -> None:
        """Start a new level."""
        self._detector = _detector(self._settings)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._sum_before, self._num_before = 0.0, 0

    def _note_version(self, version: int | None) -> None:
        if version != self._version:
            self._has_changed_version = bool(self._since_swap)
            self._version = version
            self._since_swap.clear()


class DriftDetector:
    """The streams of one pair, for the MOST_STREAMS tenants and kinds of request with the newest requests."""

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self._streams: OrderedDict[tuple[str, Work], AgreementStream] = OrderedDict()

    def update(self, request: RequestStats) -> DriftChange | None:
        """Add one request of any tenant; return the change that it reveals, if any."""
        key = (request.tenant, request.work)
        stream = self._streams.setdefault(key, AgreementStream(request.tenant, self._settings, request.work))
        self._streams.move_to_end(key)
        if len(self._streams) > MOST_STREAMS:
            self._streams.popitem(last=False)
        return stream.update(request)

    def is_drifting(self, tenant: str) -> bool:
        """Return whether the tenant's requests of any kind drift."""
        streams = (self._streams.get((tenant, work)) for work in get_args(Work))
        return any(stream is not None and stream.is_drifting for stream in streams)


def _detector(settings: DriftSettings) -> "PageHinkley":
    """Return a fresh detector. river is slow to import, so this happens only where traffic is read."""
    from river.drift import PageHinkley

    return PageHinkley(
        min_instances=settings.min_values, delta=settings.slack, threshold=settings.threshold, mode="both"
    )


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
        gate: ControllerSettings | None = None,
        statements: ChampionStatements | None = None,
    ) -> None:
        """
        Args:
            gate: what another champion must not do to the other tenants; None takes the defaults.
            statements: only measurements in signed manifests are believed; None believes all.
        """
        self._statements = statements
        self._registry, self._announcer, self._detector = registry, announcer, detector
        self._metrics, self._target, self._gate = metrics, target, gate or ControllerSettings()

    def update(self, request: RequestStats) -> None:
        """Add one request and react to the change it reveals. Raises SnapshotError, BusError."""
        change = self._detector.update(request)
        if change is None or request.is_past:
            return
        logger.warning("%s: %s: %s", self._target, change.kind, change)
        self._announcer.publish(change.kind, tenant=change.tenant, work=change.work, reason=str(change))
        counter = "omnidraft_drift_alarms_total" if change.kind == "drift" else "omnidraft_drifts_over_total"
        self._metrics.add(counter, target=self._target)  # tenants are too many to be labels
        self._annotate(change)
        if change.suspect is not None:
            self._roll_back(change.suspect, change.tenant, str(change))

    def on_announcement(self, announcement: Announcement) -> None:
        """Promote the version announced as `best` by the distiller, unless the drift is over. Raises SnapshotError."""
        version, tenant = announcement.version, announcement.tenant or ""
        if announcement.kind != "best" or version is None or not self._detector.is_drifting(tenant):
            return
        fence = announcement.fence or self._registry.fence()
        if self._registry.resolve("champion").version != version:
            reason = announcement.reason or "agrees best with the traffic that drifted"
            self._promote(version, tenant, reason, fence)

    def _annotate(self, change: DriftChange) -> None:
        try:
            champion = self._registry.resolve("champion").version
        except SnapshotNotFound:
            return
        self._registry.annotate(champion, {change.kind: str(change)})
        name = "drift_alarm" if change.kind == "drift" else "drift_over"
        self._registry.log_metrics(champion, {name: 1.0, "agreement_served": change.recent}, champion)

    def _roll_back(self, suspect: int, tenant: str, reason: str) -> None:
        """Roll back from a champion that was bad from its first requests on to the one before."""
        fence = self._registry.fence()
        try:
            previous = self._registry.resolve("previous").version
        except SnapshotNotFound:
            return
        if self._registry.resolve("champion").version == suspect:
            self._promote(previous, tenant, reason, fence)

    def _promote(self, version: int, tenant: str, reason: str, fence: str) -> None:
        """Make it the champion unless other tenants lose by it; the controller announces every champion."""
        candidate, champion = self._registry.resolve(str(version)), self._registry.resolve("champion")
        versions = signed_versions(self._registry, self._statements)
        if against := objection(candidate, champion, versions, self._gate, tenant=tenant):
            logger.warning("%s: not back to snapshot %d: %s", self._target, version, against)
            return
        try:
            self._registry.promote_unless_changed(version, fence)
        except SnapshotStale as exc:
            logger.warning("%s: not back to snapshot %d: %s", self._target, version, exc)
            return
        self._registry.annotate(version, {JUDGEMENT: f"promoted again: {reason}"})
        logger.warning("%s: back to snapshot %d: %s", self._target, version, reason)
