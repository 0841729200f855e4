"""The controller of one pair: judges challengers, runs canaries, moves `champion`, and announces it."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from omnidraft.config import ControllerSettings
from omnidraft.errors import BusError, SnapshotCorrupt, SnapshotError, SnapshotStale
from omnidraft.fleet import challengers as judgements
from omnidraft.fleet.canary_trial import CanaryTrial
from omnidraft.fleet.challengers import Challengers, find_version, is_undecided, was_only_canary
from omnidraft.fleet.control_log import ControlLog
from omnidraft.fleet.drift_recovery import DriftRecovery, Rewinds
from omnidraft.fleet.promotion import Decision, decide, decide_first, lineage_between, lineage_to, signed_versions
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.fleet.tenant_gate import MOST_HISTORY
from omnidraft.ports import JUDGEMENT, VOID, Canary, Champion, ControlState, Metrics, Registry, SnapshotVersion
from omnidraft.snapshots.manifest import digest
from omnidraft.snapshots.signing import UNSIGNED, SnapshotSigning

POLL_S, CONTROL_TIMEOUT_S = 1.0, 2.0
"""Waits between steps, and of the first for the control log, whose open drifts must be known before traffic is read."""
VERSIONS_OF_HISTORY = 10 * MOST_HISTORY
"""The number of versions up to the champion among which its ancestors are looked for; most were not refused."""
logger = logging.getLogger(__name__)


class Controller:
    """Judges every challenger once: by its offline measurements, then, with `canary_share`, by how it serves requests.

    Order: annotate the reason, promote, annotate that it was promoted, announce. The alias is authoritative, and the
    champion is announced once after every start and whenever it is not the one announced last; so the next step repairs
    what a controller killed in between, or an alias moved by hand, left inconsistent. Where values are signed, an alias
    that neither the control log nor this process vouches for is not announced. An announced champion ends any canary,
    so a killed controller leaves none behind. Announcing twice does no harm. A decision made before an operator
    promoted is void, and that challenger is not judged again: the next one is judged against the champion that the
    operator chose.
    """

    def __init__(
        self,
        registry: Registry,
        control: ControlLog,
        settings: ControllerSettings,
        metrics: Metrics,
        *,
        target: str,
        traffic: RequestStatsReader | None = None,
        recovery: DriftRecovery | None = None,
        signing: SnapshotSigning = UNSIGNED,
        restate_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            traffic: statistics of served requests; needed for canaries and for drift.
            recovery: receives `traffic` without a canary's, and before it what changed in the control log.
            signing: without keys, whatever the registry calls champion is announced.
            restate_s: the seconds after which the champion is announced again, before its announcement is too old.
        """
        self._registry, self._control, self._target = registry, control, target
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._traffic, self._recovery = traffic, recovery
        self._challengers = Challengers(registry, clock)
        self._judged_version: int | None = None
        self._signing, self._restate_s, self._state = signing, restate_s, ControlState()
        self._promoted_version: int | None = None
        self._announced_version: int | None = None
        self._announced_s = 0.0
        self._refused_version: int | None = None
        self._trial: CanaryTrial | None = None
        self._canaries: set[int] = set()
        """The canary and those before it that did not become champion; workers may still finish requests with them."""
        self._has_resumed = False
        self._rewinds = Rewinds(registry, control, target)
        self._open_promotion: tuple[int, Decision, str] | None = None
        """Version, decision and fence of a promotion that an error cut off; it may have moved the alias."""

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; while the registry or log is down, retry every POLL_S."""
        is_failing = False
        while not stop.is_set():
            try:
                self.step()
                is_failing = False
            except (SnapshotError, BusError) as exc:
                self._metrics.add("omnidraft_controller_errors_total")
                if not is_failing:
                    logger.warning("controller waits: %s", exc)
                is_failing = True
            stop.wait(POLL_S)

    def step(self) -> None:
        """Judge, announce and read traffic once; that is read while the registry is down, too. Raises SnapshotError,
        BusError; the next step completes this one."""
        try:
            self._complete_promotion()  # before the champion is announced: an operator may have promoted meanwhile
            self._judge_challenger()
            self._announce_champion()
            self._resume_recovery()
        finally:
            self._read_traffic()
        if self._recovery:
            self._recovery.react()
        self._end_trial()
        self._announce_champion()

    def meanwhile(self) -> None:
        """Read traffic while a call of the registry is not answered, from the thread that waits for it."""
        with suppress(BusError):  # the next step meets it again
            self._read_traffic()

    def _complete_promotion(self) -> None:
        """Promote what was decided, in this step or in one that was cut off; a deleted version is left alone."""
        if self._open_promotion is None:
            return
        version, decision, fence = self._open_promotion
        is_promoted = find_version(self._registry, str(version)) is not None and self._promote(version, fence)
        self._open_promotion = None
        if is_promoted:
            self._count_decision(version, decision)

    def _judge_challenger(self) -> None:
        """Judge the challenger, one at a time: while a canary runs the next one waits."""
        waiting = None if self._trial is not None else self._challengers.find()
        if waiting is None or waiting.version == self._judged_version:
            return
        fence = self._registry.fence()  # before what the decision rests on is read
        challenger, champion = self._challengers.find(), find_version(self._registry, "champion")
        if challenger is None:
            return
        if (challenger.judgement or "").startswith((VOID, judgements.PROMOTED)):
            self._judged_version = challenger.version  # that was decided, before this process began
            return
        if champion is not None and not self._is_vouched_for(champion):
            return  # its manifest is half of the comparison
        if champion is None or champion.version != challenger.version:
            self._judge(challenger, champion, fence)
        self._judged_version = challenger.version

    def _judge(self, challenger: SnapshotVersion, champion: SnapshotVersion | None, fence: str) -> None:
        decision = self._decide(challenger, champion)
        if decision.promote and champion and self._settings.canary_share and self._traffic:
            self._start_canary(challenger.version, champion.version, decision, fence)
        else:
            self._settle(challenger.version, decision, fence)

    def _decide(self, challenger: SnapshotVersion, champion: SnapshotVersion | None) -> Decision:
        if champion is None:
            return decide_first(challenger, signed_versions(self._registry, self._signing), self._settings)
        newest = max(challenger.version - champion.version, 0) + VERSIONS_OF_HISTORY
        versions = signed_versions(self._registry, self._signing, newest)
        between = lineage_between(versions, challenger.manifest, champion.manifest)
        history = lineage_to(versions, champion.manifest, MOST_HISTORY)
        return decide(challenger.manifest, champion.manifest, self._settings, between=between, history=history)

    def _start_canary(self, version: int, champion: int, decision: Decision, fence: str) -> None:
        self._announce_champion()  # before the canary, which it would end
        share = self._settings.canary_share
        self._registry.annotate(version, {JUDGEMENT: f"{judgements.CANARY} {share:.1%}: {decision.reason}"})
        manifest = self._registry.resolve(str(version)).manifest
        canary = Canary(version=version, share=share, digest=digest(manifest))
        self._control.put(("canary",), canary, decision.reason)
        self._trial = CanaryTrial(version, champion, self._settings, self._clock(), fence)
        self._canaries.add(version)
        logger.info("%s: canary %d beside champion %d: %s", self._target, version, champion, decision.reason)

    def _resume_recovery(self) -> None:
        """Go on with the drifts that the control log has open, before any traffic is read."""
        if not self._has_resumed and self._recovery is not None:
            versions = self._registry.versions(VERSIONS_OF_HISTORY)
            self._canaries |= {each.version for each in versions if was_only_canary(each)}
            state, _ = self._control.poll_all(CONTROL_TIMEOUT_S)
            self._recovery.resume(state)
        self._has_resumed = True

    def _read_traffic(self) -> None:
        """Announce the drifts in new requests, and add these to the trial."""
        if self._traffic is None or not self._has_resumed:
            return
        if self._recovery:
            self._state, changes = self._control.poll(0.0)
            for each in changes:
                self._recovery.on_change(each)
            self._recovery.announce()
        for request in self._traffic.new():
            if self._trial and not request.is_past:
                self._trial.update(request)
            if self._recovery and request.version not in self._canaries:
                self._recovery.update(request)

    def _end_trial(self) -> None:
        """End the canary once there is a verdict. Announcing the champion again ends a failed one on every worker."""
        trial = self._trial
        if trial is None or (decision := trial.verdict(self._clock())) is None:
            return
        if find_version(self._registry, str(trial.version)) is None:
            logger.warning("%s: canary %d ends without a verdict: it was deleted", self._target, trial.version)
        else:
            self._settle(trial.version, decision, trial.fence)
        self._trial, self._announced_version = None, None

    def _settle(self, version: int, decision: Decision, fence: str) -> None:
        verdict = judgements.PROMOTING if decision.promote else judgements.REFUSED
        self._registry.annotate(version, {JUDGEMENT: f"{verdict}: {decision.reason}"})
        if decision.promote:
            self._open_promotion = version, decision, fence
            self._complete_promotion()
        else:
            self._count_decision(version, decision)

    def _promote(self, version: int, fence: str) -> bool:
        """Return whether the version is the champion now; the decision is void if what it rests on has changed."""
        try:
            self._registry.promote_unless_changed(version, fence)
        except (SnapshotStale, SnapshotCorrupt) as exc:
            self._registry.annotate(version, {JUDGEMENT: f"{VOID}: {exc}"})
            logger.warning("%s: a decision is void: %s", self._target, exc)
            return False
        self._promoted_version = version
        return True

    def _count_decision(self, version: int, decision: Decision) -> None:
        self._rewinds.count(version, decision)
        try:
            self._registry.log_metrics(version, {"promoted": float(decision.promote)}, version)
        except SnapshotError as exc:  # a curve is not worth a second judgement
            logger.warning("%s: the verdict on version %d is in no curve: %s", self._target, version, exc)
        self._metrics.add("omnidraft_promotions_total" if decision.promote else "omnidraft_refusals_total")
        verdict = judgements.PROMOTED if decision.promote else judgements.REFUSED
        logger.info("%s version %d for %s: %s", verdict, version, self._target, decision.reason)

    def _announce_champion(self) -> None:
        """Announce the champion unless it is the one announced last, and not long ago. A champion that changed while a
        canary ran ends that trial; one that changed during its announcement is announced next."""
        while (champion := find_version(self._registry, "champion")) is not None and self._must_announce(champion):
            if not self._is_vouched_for(champion):
                return
            self._note_promotion(champion)
            self._void_trial(champion)
            self._control.put(("champion",), Champion(version=champion.version, digest=digest(champion.manifest)))
            self._announced_s = self._clock()
            if self._announced_version is not None and champion.version < self._announced_version:
                self._metrics.add("omnidraft_rollbacks_total")
            self._announced_version, self._trial = champion.version, None
            self._canaries.discard(champion.version)
            self._metrics.set("omnidraft_champion_version_info", champion.version)
            logger.info("announced champion %d for %s", champion.version, self._target)

    def _note_promotion(self, champion: SnapshotVersion) -> None:
        """Annotate that a version was promoted whose judgement does not say so yet."""
        judgement = champion.judgement or ""
        if judgement.startswith(judgements.PROMOTING):
            self._registry.annotate(
                champion.version, {JUDGEMENT: judgements.PROMOTED + judgement.removeprefix(judgements.PROMOTING)}
            )
        elif is_undecided(champion.judgement):
            self._registry.annotate(champion.version, {JUDGEMENT: judgements.BY_OPERATOR})

    def _void_trial(self, champion: SnapshotVersion) -> None:
        """Annotate the canary that another promotion ended; nothing to note if that is its own, or it is deleted."""
        trial = self._trial
        if trial is None or champion.version in (trial.champion, trial.version):
            return
        if find_version(self._registry, str(trial.version)) is not None:
            reason = f"version {champion.version} became champion while it was a canary beside {trial.champion}"
            self._registry.annotate(trial.version, {JUDGEMENT: f"{VOID}: {reason}"})

    def _must_announce(self, champion: SnapshotVersion) -> bool:
        if champion.version != self._announced_version:
            return True
        is_due = self._restate_s is not None and self._clock() - self._announced_s >= self._restate_s
        return is_due and self._trial is None

    def _is_vouched_for(self, champion: SnapshotVersion) -> bool:
        """Return whether the control log names it, or this process made it the champion; all are, without keys."""
        if self._signing.trusted_keys is None or champion.version == self._promoted_version:
            return True
        self._state, _ = self._control.poll(0.0)
        named = self._state.champion
        if named is not None and named == Champion(version=champion.version, digest=digest(champion.manifest)):
            self._refused_version = None
            return True
        if champion.version != self._refused_version:
            self._metrics.add("omnidraft_champions_refused_total")
            logger.error(
                "%s: neither announced nor compared with: version %d is called champion, which nobody vouches for; an "
                "operator who wants it to serve promotes it: `omnidraft snapshots promote`",
                self._target,
                champion.version,
            )
        self._refused_version = champion.version
        return False
