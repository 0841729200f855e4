"""The judge of challengers: held-out records first, then, with `canary_share`, a canary that serves live requests.

It decides and tries out, and promotes nothing itself: the controller carries out its verdicts.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from omnidraft.config import ControllerSettings
from omnidraft.fleet.canary_trial import CanaryTrial
from omnidraft.fleet.challengers import Challengers, find_version, is_open
from omnidraft.fleet.lease import ControllerLease
from omnidraft.fleet.promotion import Decision, believed_versions, decide, decide_first, lineage_between, lineage_to
from omnidraft.fleet.request_stats import RequestStats
from omnidraft.fleet.tenant_gate import MOST_HISTORY
from omnidraft.ports import Canary, Judgement, Registry, SnapshotVersion
from omnidraft.snapshots.manifest import digest
from omnidraft.snapshots.signing import SnapshotSigning

VERSIONS_OF_HISTORY = 10 * MOST_HISTORY
"""The number of versions up to the champion among which its ancestors are looked for; most were not refused."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about a challenger."""

    challenger: SnapshotVersion
    decision: Decision
    after: str | None
    """The promotion of the champion that it was compared with; None: there was no champion."""
    was_canary: bool = False

    @property
    def judgement(self) -> Judgement:
        """The judgement once it is carried out."""
        said = self.decision
        return Judgement(
            state="promoted" if said.promote else "refused",
            reason=said.reason,
            was_canary=self.was_canary,
            gain=said.gain,
            gain_error=said.gain_error,
        )


class Judge:
    """Judges the challengers of one pair, one at a time: while a canary runs the next one waits."""

    def __init__(
        self,
        registry: Registry,
        control: ControllerLease,
        settings: ControllerSettings,
        *,
        target: str,
        signing: SnapshotSigning,
        clock: Callable[[], float],
    ) -> None:
        """`signing`: only measurements in signed manifests are believed."""
        self._registry, self._control, self._settings, self._target = registry, control, settings, target
        self._signing, self._clock, self._challengers = signing, clock, Challengers(registry, clock)
        self._trial: CanaryTrial | None = None
        self._after: str | None = None
        """The promotion of the champion beside which the canary is tried."""
        self.canaries: set[int] | None = None
        """The canary and those before it that did not become champion, with which workers may still finish requests;
        None: not known before `resume`."""

    @property
    def is_trying(self) -> bool:
        """Whether a canary is on trial."""
        return self._trial is not None

    def resume(self) -> None:
        """Look up the canaries of earlier controllers, at first. Raises RegistryError."""
        if self.canaries is None:
            versions = self._registry.versions(VERSIONS_OF_HISTORY)
            self.canaries = {each.version for each in versions if _was_only_canary(each)}

    def judge(self, champion: SnapshotVersion | None) -> Verdict | None:
        """Return a verdict on the challenger against the champion, if one waits; it may begin a trial instead."""
        after = self._control.promotion  # before the registry is asked, which may take its time
        if self._trial is not None or (challenger := self._challengers.find()) is None:
            return None
        decision = self._decide(challenger, champion)
        if not decision.promote or champion is None or not self._settings.canary_share:
            return Verdict(challenger, decision, after)
        trying = Judgement(state="canary", reason=decision.reason, was_canary=True)
        self._registry.annotate(challenger.version, trying.notes())
        if self._control.promotion == after:  # else an order came meanwhile
            self._begin_trial(challenger, champion.version, decision.reason)
        return None

    def update(self, request: RequestStats) -> None:
        """Count a request that was served."""
        if self._trial is not None and not request.is_past:
            self._trial.update(request)

    def end_trial(self, *, has_counted_all: bool) -> Verdict | None:
        """End the trial if it is over, or void since another version became champion; return the verdict, which may be
        missing where the version was deleted. It is not over before all requests of the log have been counted."""
        if (trial := self._trial) is None:
            return None
        decision = trial.verdict(self._clock()) if has_counted_all else None
        if self._control.promotion != self._after:
            decision = Decision(False, f"there was another promotion while it was a canary beside {trial.champion}")
        if decision is None:
            return None
        challenger = find_version(self._registry, trial.version)
        self._trial = None
        if challenger is None:
            logger.warning("%s: canary %d ends without a verdict: it was deleted", self._target, trial.version)
        if challenger is None or not is_open(challenger):  # else an order promoted it
            return None
        return Verdict(challenger, decision, self._after, was_canary=True)

    def _begin_trial(self, challenger: SnapshotVersion, champion: int, reason: str) -> None:
        version, self._after = challenger.version, self._control.promotion
        share = self._settings.canary_share
        self._control.put_canary(Canary(version=version, digest=digest(challenger.manifest), share=share), reason)
        self._trial = CanaryTrial(version, champion, self._settings, self._clock())
        self.canaries = {version, *(self.canaries or ())}
        logger.info("%s: canary %d beside champion %d: %s", self._target, version, champion, reason)

    def _decide(self, challenger: SnapshotVersion, champion: SnapshotVersion | None) -> Decision:
        if not self._signing.trusts(challenger.manifest):
            return Decision(False, "no distiller that is trusted signed it")
        if champion is None:
            return decide_first(challenger, believed_versions(self._registry, self._signing), self._settings)
        newest = max(challenger.version - champion.version, 0) + VERSIONS_OF_HISTORY
        versions = believed_versions(self._registry, self._signing, newest)
        between = lineage_between(versions, challenger.manifest, champion.manifest)
        history = lineage_to(versions, champion.manifest, MOST_HISTORY)
        return decide(challenger.manifest, champion.manifest, self._settings, between=between, history=history)


def _was_only_canary(version: SnapshotVersion) -> bool:
    """Return whether requests that it served were a canary's, as far as is known."""
    judgement = version.judgement
    return judgement is not None and judgement.was_canary and judgement.state != "promoted"
