"""The reaction to a drift: a fall of agreement that drift.py detects, and its end.

The cheapest measure comes first: the announcement alone makes workers draft less for this traffic; a fall that came
with the first requests of a snapshot rolls back to the one before; otherwise the distiller announces which earlier
snapshot agrees best with the new traffic, and publishes more often until the drift is over. No snapshot returns by
which other tenants lose. Every step is recorded on the control log, as an annotation of the champion,
and in the process's log. The control log says after a restart which drifts are open: these go on, and none of them is
handled twice. A fall that happened while no controller ran, and is not over, is handled with the first request after.

What other tenants lose by a return counts, else a tenant could choose the champion for all: his traffic falls as soon
as a snapshot serves, and the one before returns; or he sends what a refused snapshot knows best, and that one is found
to agree best with his traffic. So a snapshot that was never champion's ancestor has to pass the promotion gate, and an
ancestor must not undo what other tenants gained since, by the gate's tests of tenants on the same held-out records.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from omnidraft.config import ControllerSettings
from omnidraft.errors import SnapshotCorrupt, SnapshotError, SnapshotNotFound
from omnidraft.fleet.challengers import find_version
from omnidraft.fleet.drift import MOST_STREAMS, DriftChange, DriftDetector, traffic_name
from omnidraft.fleet.lease import ControllerLease
from omnidraft.fleet.promotion import believed_versions, decide, lineage_between
from omnidraft.fleet.request_stats import RequestStats
from omnidraft.fleet.tenant_gate import fallen_tenants
from omnidraft.ports import Best, Champion, Drift, Entry, Metrics, Registry, Rewind, SnapshotVersion, Work
from omnidraft.snapshots.manifest import Manifest, TenantAgreement
from omnidraft.snapshots.signing import SnapshotSigning

logger = logging.getLogger(__name__)


def objection(
    candidate: SnapshotVersion,
    champion: SnapshotVersion,
    versions: Sequence[SnapshotVersion],
    settings: ControllerSettings,
    *,
    tenant: str,
) -> str | None:
    """Return why the candidate may not replace the champion for the sake of this tenant's traffic; None: it may."""
    undone = _lineage(versions, candidate.manifest, champion.manifest)
    if undone:
        reverted = [_reverted(each, tenant) for each in undone]
        falls = fallen_tenants(reverted, (), tolerance=settings.tolerance)
        return "; ".join(map(str, falls)) or None
    since = _lineage(versions, champion.manifest, candidate.manifest)
    if not since:
        return "neither descends from the other, so the other tenants' agreement cannot be compared"
    decision = decide(candidate.manifest, champion.manifest, settings, between=since[:-1])
    return None if decision.promote else decision.reason


def _lineage(versions: Sequence[SnapshotVersion], old: Manifest, new: Manifest) -> list[Manifest]:
    """Return the snapshots from the child of the old one to the new one; empty when that does not descend from it."""
    between = lineage_between(versions, new, old)
    is_child = new.parent_id == old.snapshot_id
    return [*between, new] if between or is_child else []


def _reverted(manifest: Manifest, tenant: str) -> Manifest:
    """Return the manifest as if the snapshot were undone, for all tenants but this one."""
    others = [
        TenantAgreement(
            tenant=each.tenant,
            num_requests=each.num_requests,
            before=each.after,
            after=each.before,
            change_error=each.change_error,
        )
        for each in manifest.tenants
        if each.tenant != tenant
    ]
    return manifest.model_copy(update={"tenants": tuple(others)})


REWIND_AFTER = 6
"""Challengers in a row that were setbacks (see Decision), after which learning goes back to the champion's weights and
optimizer, and on from its own place in the log."""


class Rewinds:
    """Counts the setbacks of one pair, since this process started and since the last rewind."""

    def __init__(self, control: ControllerLease, target: str, limit: int | None = REWIND_AFTER) -> None:
        """Give the order after `limit` setbacks in a row, never if that is None."""
        self._control, self._limit, self._target = control, limit, target
        self._setbacks: list[str] = []
        """The ids of these snapshots."""
        self._last_rewind = 0

    def count(self, challenger: Manifest, *, is_setback: bool) -> None:
        """Count a decision."""
        last_rewind = self._control.state.sequence("rewind")
        if not is_setback or last_rewind != self._last_rewind:
            self._setbacks, self._last_rewind = [], last_rewind
        if is_setback:
            self._setbacks.append(challenger.snapshot_id)

    def order(self) -> None:
        """Give the order if it is due. What raises BusError is done by the next call."""
        champion = self._control.state.champion
        if self._limit is None or len(self._setbacks) < self._limit or champion is None:
            return
        judged = f"worse than champion {champion.version}, or not to be compared with it"
        reason = f"{len(self._setbacks)} challengers in a row were {judged}"
        self._control.put(("rewind",), Rewind(version=champion.version, id=self._setbacks[-1]), reason)
        self._setbacks = []
        logger.warning("%s: learning goes back to champion %d: %s", self._target, champion.version, reason)


class Promote(Protocol):
    """Makes a version the champion in the place of the one under this promotion, unless that is another by now."""

    def __call__(self, version: SnapshotVersion, reason: str, *, after: str | None) -> None: ...


class DriftRecovery:
    """Handles the drifts of one pair."""

    def __init__(
        self,
        registry: Registry,
        control: ControllerLease,
        metrics: Metrics,
        gate: ControllerSettings,
        *,
        target: str,
        signing: SnapshotSigning,
    ) -> None:
        """
        Args:
            gate: what another champion must not do to the other tenants.
            signing: only measurements in signed manifests are believed.
        """
        self._registry, self._control, self._detector = registry, control, DriftDetector()
        self._metrics, self._target, self._gate, self._signing = metrics, target, gate, signing
        self._alarms: deque[Callable[[], None]] = deque()
        """What is still to be announced, oldest first."""
        self._reactions: deque[Callable[[Promote], None]] = deque()
        """What is still to be done in the registry, likewise."""
        self._past_falls: dict[tuple[str, Work], DriftChange] = {}
        """Falls in past requests that are not over, until their streams have requests again."""

    def update(self, request: RequestStats) -> None:
        """Add one request and announce the change it reveals; `react` does the rest. Raises BusError; then `announce`
        goes on."""
        stream = (request.tenant, request.work)
        if not request.is_past and (fall := self._past_falls.pop(stream, None)) is not None:
            self._take(fall)
        change = self._detector.update(request)
        self._end_evicted()
        if change is not None and not request.is_past:
            self._take(change)
        elif change is not None and change.kind == "drift":
            self._past_falls[stream] = change
        elif change is not None:
            self._past_falls.pop(stream, None)
        self.announce()

    def announce(self) -> None:
        """Announce what is to be announced, without the registry. What raises BusError is done again by the next
        call."""
        while self._alarms:
            self._alarms[0]()
            self._alarms.popleft()

    def react(self, promote: Promote) -> None:
        """Do in the registry what is to be done. What raises RegistryError is done again by the next call; what cannot
        be done, since a snapshot is gone or damaged, is left out."""
        while self._reactions:
            try:
                self._reactions[0](promote)
            except (SnapshotNotFound, SnapshotCorrupt) as exc:
                logger.warning("%s: a reaction to a drift is left out: %s", self._target, exc)
            self._reactions.popleft()

    def follow(self, changes: Sequence[Entry]) -> None:
        """Take what the control log says: drifts that began before this process did go on, and the version that the
        distiller found best is promoted by `react`, unless the drift is over by then."""
        for each in changes:
            if isinstance(each.value, Drift):
                tenant, work = each.key[1:]
                self._detector.resume_drift(tenant, cast(Work, work), each.value.level)
            elif isinstance(each.value, Best):
                self._reactions.append(partial(self._promote_best, each.value, each.key[1], each.reason))

    def _end_evicted(self) -> None:
        for tenant, work in self._detector.evict():
            if self._past_falls.pop((tenant, work), None) is not None:
                continue  # it was not announced
            name = traffic_name(tenant, work)
            reason = f"agreement of {name} is watched no more: {MOST_STREAMS} others had requests since"
            self._alarms.append(partial(self._announce, tenant, work, None, reason))

    def _take(self, change: DriftChange) -> None:
        tenant, reason = change.tenant, str(change)
        drift = Drift(level=change.level) if change.kind == "drift" else None
        self._alarms.append(partial(self._announce, tenant, change.work, drift, reason))
        self._reactions.append(partial(self._annotate, change))
        if change.suspect is not None:
            self._reactions.append(partial(self._roll_back, change.suspect, tenant, reason))

    def _announce(self, tenant: str, work: Work, drift: Drift | None, reason: str) -> None:
        logger.warning("%s: %s: %s", self._target, "drift" if drift else "drift over", reason)
        self._control.put(("drift", tenant, work), drift, reason)
        counter = "omnidraft_drift_alarms_total" if drift else "omnidraft_drifts_over_total"
        self._metrics.add(counter, target=self._target)  # tenants are too many to be labels

    def _annotate(self, change: DriftChange, _: Promote) -> None:
        """Annotate the champion, at best: what a registry refuses holds nothing else up."""
        try:
            self._registry.annotate(self._registry.resolve("champion").version, {change.kind: str(change)})
        except SnapshotError as exc:
            logger.warning("%s: %s is not noted at the champion: %s", self._target, change.kind, exc)

    def _roll_back(self, suspect: int, tenant: str, reason: str, promote: Promote) -> None:
        """Roll back from a champion that was bad from its first requests on to the one before."""
        champion, previous = self._control.state.champion, find_version(self._registry, "previous")
        if previous is not None and champion is not None and champion.version == suspect:
            self._promote(previous, champion, tenant, reason, promote)

    def _promote_best(self, best: Best, tenant: str, reason: str | None, promote: Promote) -> None:
        champion = self._control.state.champion
        if not self._detector.is_drifting(tenant) or champion is None or champion.version == best.version:
            return
        if best.promotion != champion.promotion:
            logger.warning("%s: not to snapshot %d: the champion is another by now", self._target, best.version)
            return
        why = reason or "agrees best with the traffic that drifted"
        self._promote(self._registry.resolve(str(best.version)), champion, tenant, why, promote)

    def _promote(
        self, candidate: SnapshotVersion, champion: Champion, tenant: str, reason: str, promote: Promote
    ) -> None:
        """Make it the champion, unless other tenants lose by it."""
        serving = self._registry.resolve(str(champion.version))
        versions = believed_versions(self._registry, self._signing)
        if against := objection(candidate, serving, versions, self._gate, tenant=tenant):
            logger.warning("%s: not to snapshot %d: %s", self._target, candidate.version, against)
            return
        logger.warning("%s: to snapshot %d: %s", self._target, candidate.version, reason)
        promote(candidate, reason, after=champion.promotion)
