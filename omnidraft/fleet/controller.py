"""The controller of one pair: judges challengers, tries them out, moves `champion`, and tells the fleet."""

import logging
import threading
import time
from collections.abc import Callable

from omnidraft.config import ControllerSettings
from omnidraft.errors import BusError, SnapshotError, SnapshotNotFound, SnapshotStale
from omnidraft.fleet.canary_trial import CanaryTrial
from omnidraft.fleet.drift_recovery import DriftRecovery
from omnidraft.fleet.promotion_gate import Decision, decide, lineage_between
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.ports import Announcer, ControlFollower, Metrics, Registry, SnapshotVersion

logger = logging.getLogger(__name__)


class Controller:
    """Judges every challenger once: by what was measured offline, then, where a share of the requests is set aside
    for that, by how it serves them.

    Order: write down why, promote, announce. The alias is the truth, and the champion is announced once after every
    start and whenever it is not the one announced last; so a controller killed in between, or an alias moved by hand,
    is made good by the next step. An announced champion ends any canary, so a killed controller leaves none behind.
    Saying it twice does no harm. What was decided before an operator promoted is void, and that challenger is left
    alone: the next one is judged against the champion that the operator chose.
    """

    def __init__(
        self,
        registry: Registry,
        announcer: Announcer,
        settings: ControllerSettings,
        metrics: Metrics,
        *,
        target: str,
        traffic: RequestStatsReader | None = None,
        recovery: DriftRecovery | None = None,
        follower: ControlFollower | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            traffic: what was served; needed for canaries and for drift.
            recovery: told of all traffic, and of what `follower` hears.
        """
        self._registry, self._announcer, self._target = registry, announcer, target
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._traffic, self._recovery, self._follower = traffic, recovery, follower
        self._judged: int | None = None
        self._announced: int | None = None
        self._trial: CanaryTrial | None = None

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; a registry or log that is down is waited for."""
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
            stop.wait(self._settings.poll_s)

    def step(self) -> None:
        """Raises SnapshotError, BusError; the next step does what this one could not."""
        self._judge_newest()
        self._announce_champion()
        self._watch()
        self._end_trial()
        self._announce_champion()

    def _judge_newest(self) -> None:
        """One challenger at a time: while one is on trial the next ones wait."""
        waiting = self._find("challenger")
        if waiting is None or waiting.version == self._judged or self._trial is not None:
            return
        fence = self._registry.fence()  # before what the decision rests on is read
        challenger, champion = self._find("challenger"), self._find("champion")
        if challenger is None:
            return
        if champion is None or champion.version != challenger.version:
            self._judge(challenger, champion, fence)
        self._judged = challenger.version

    def _judge(self, challenger: SnapshotVersion, champion: SnapshotVersion | None, fence: str) -> None:
        between = lineage_between(self._registry.versions(), challenger.manifest, champion.manifest) if champion else []
        decision = decide(challenger.manifest, champion.manifest if champion else None, self._settings, between=between)
        if decision.promote and champion and self._settings.canary_share and self._traffic:
            self._try_out(challenger.version, champion.version, decision, fence)
        else:
            self._settle(challenger.version, decision, fence)

    def _try_out(self, version: int, champion: int, decision: Decision, fence: str) -> None:
        self._announce_champion()  # before the canary, which it would end
        share = self._settings.canary_share
        self._registry.annotate(version, {"judgement": f"canary at {share:.1%}: {decision.reason}"})
        self._announcer.publish("canary", version, share=share, reason=decision.reason)
        self._trial = CanaryTrial(version, champion, self._settings, self._clock(), fence)
        logger.info("%s: canary %d beside champion %d: %s", self._target, version, champion, decision.reason)

    def _watch(self) -> None:
        if self._traffic is None:
            return
        for request in self._traffic.new():
            if self._trial:
                self._trial.update(request)
            if self._recovery:
                self._recovery.update(request)
        for told in self._follower.poll(0.0) if self._follower else ():
            if self._recovery:
                self._recovery.on_announcement(told)

    def _end_trial(self) -> None:
        """The champion is announced again after a canary that failed, which ends it on every worker."""
        trial = self._trial
        if trial is None or (decision := trial.verdict(self._clock())) is None:
            return
        self._settle(trial.version, decision, trial.fence)
        self._trial, self._announced = None, None

    def _settle(self, version: int, decision: Decision, fence: str) -> None:
        verdict = "promoted" if decision.promote else "refused"
        self._registry.annotate(version, {"judgement": f"{verdict}: {decision.reason}"})
        if decision.promote:
            try:
                self._registry.promote_unless_changed(version, fence)
            except SnapshotStale as exc:
                self._registry.annotate(version, {"judgement": f"void: {exc}"})
                logger.warning("%s: a decision is void: %s", self._target, exc)
                return
        self._registry.log_metrics(version, {"promoted": float(decision.promote)}, version)
        self._metrics.add("omnidraft_promotions_total" if decision.promote else "omnidraft_refusals_total")
        logger.info("%s version %d for %s: %s", verdict, version, self._target, decision.reason)

    def _announce_champion(self) -> None:
        """Unless it is known to all. A champion that changed while a canary was out ends that trial; one that changed
        while it was announced is announced after it."""
        while (champion := self._find("champion")) is not None and champion.version != self._announced:
            self._announcer.publish("champion", champion.version)
            if self._announced is not None and champion.version < self._announced:
                self._metrics.add("omnidraft_rollbacks_total")
            self._announced, self._trial = champion.version, None
            self._metrics.set("omnidraft_champion_version_info", champion.version)
            logger.info("announced champion %d for %s", champion.version, self._target)

    def _find(self, alias: str) -> SnapshotVersion | None:
        try:
            return self._registry.resolve(alias)
        except SnapshotNotFound:
            return None
