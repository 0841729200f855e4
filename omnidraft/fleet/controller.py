"""The controller of one pair: it alone decides which snapshot serves, and moves the registry's aliases.

What serves is what the control log says: its `champion`, put under the newest lease (lease.py). The registry's aliases
repeat it. A snapshot becomes champion in four steps, and whichever a controller dies at, the next one goes on there:

1. its judgement is noted as `promoting`, which is not final: up to the next step it is judged anew;
2. it is put into the log as `champion`, unless another was put meanwhile, and read back: from here on it serves;
3. the alias `champion` is moved to it, and `previous` to the one before;
4. its judgement is noted as `promoted`, with the promotion's name: before, an alias that says something else is stale
   and is moved; from here on, a hand moved it.

So nothing is promoted by mistake: only what has no final judgement is judged; only against the champion of the log, by
the very manifest that the log names; and that champion must still be in force at step 2. Operators put orders into the
log; the newest is carried out before anything else is decided, without the registry if it goes back to the champion
before. An alias that was moved by hand, as on MLflow's page, is an order too. Where values are signed it is none, since
who can write to the registry need not be an operator: it is moved back. Where the champion was deleted and no alias
names another, nothing is judged before an operator names one.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from omnidraft.config import ControllerSettings
from omnidraft.errors import BusError, LeaseLost, SnapshotCorrupt, SnapshotError, SnapshotNotFound
from omnidraft.fleet.challengers import find_version, is_open
from omnidraft.fleet.drift_recovery import DriftRecovery, Rewinds
from omnidraft.fleet.judge import Judge, Verdict
from omnidraft.fleet.lease import ControllerLease
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.ports import Champion, Judgement, Metrics, Registry, SnapshotVersion
from omnidraft.snapshots.manifest import digest
from omnidraft.snapshots.signing import UNSIGNED, SnapshotSigning

POLL_S = 1.0
"""The wait between steps."""
logger = logging.getLogger(__name__)


class Controller:
    """Promotes what the judge finds better, and what operators order."""

    def __init__(
        self,
        registry: Registry,
        control: ControllerLease,
        traffic: RequestStatsReader,
        metrics: Metrics,
        settings: ControllerSettings,
        *,
        target: str,
        signing: SnapshotSigning = UNSIGNED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            traffic: statistics of served requests, for canaries and drift.
            signing: with trusted keys, only measurements in signed manifests are believed, and an alias that was moved
                by hand is moved back.
        """
        self._registry, self._control, self._traffic, self._metrics = registry, control, traffic, metrics
        self._target, self._signing = target, signing
        self._judge = Judge(registry, control, settings, target=target, signing=signing, clock=clock)
        self._recovery = DriftRecovery(registry, control, metrics, settings, target=target, signing=signing)
        self._rewinds = Rewinds(control, target)
        self._known: dict[int, SnapshotVersion] = {}
        """The champion and the one before, to which an order may go back without the registry."""
        self._serving: SnapshotVersion | None = None
        """The champion, as the registry has it."""
        self._problem: str | None = None

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; while the registry or log is down, retry every POLL_S. Raises LeaseLost."""
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
            if not self._control.wait(POLL_S):
                stop.wait(POLL_S)

    def step(self) -> None:
        """Decide what is to be decided; traffic is read while the registry is down, too.

        Raises:
            SnapshotError, BusError: the registry or the log failed; the next step goes on from there.
            LeaseLost: another controller decides.
        """
        try:
            self.obey()
            self._judge.resume()
            if self.align():
                self._settle(self._judge.judge(self._serving))
            self._rewinds.order()
        finally:
            self._read_traffic()
        self._recovery.react(self._promote_again)
        self._settle(self._judge.end_trial(has_counted_all=self._traffic.is_at_end))
        champion = self._control.state.champion
        if champion is not None and self._control.state.canary and not self._judge.is_trying:
            self._control.put_champion(champion, "the canary is over")

    def close(self) -> None:
        """Let another controller start."""
        self._control.close()

    def meanwhile(self) -> None:
        """Obey and read traffic while a call of the registry is not answered, from the thread that waits for it: after
        every such call the orders, the champion and the lease may be others."""
        with suppress(BusError, LeaseLost):  # the next step meets them again
            self.obey(is_registry_silent=True)
            self._read_traffic()

    def obey(self, *, is_registry_silent: bool = False) -> None:
        """Take the lease, at first; then carry out the newest order, which supersedes those before it. Its id names the
        promotion, so it is the same one if a controller that dies here leaves it to the next."""
        self._recovery.follow(self._control.follow())
        if not (orders := self._control.orders):
            return
        key, order = orders[-1]
        chosen, refusal = self._known.get(order.version), ""
        if chosen is None and is_registry_silent:
            return
        try:
            chosen = chosen or self._registry.resolve(str(order.version))
            if not chosen.is_servable:
                raise SnapshotNotFound(f"version {chosen.version} has no weights any more")
            if self._control.orders != orders:  # `meanwhile` has carried them out, or heard of newer ones
                return self.obey()
            self._put(chosen, key[1], "", is_ordered=True)
        except (SnapshotNotFound, SnapshotCorrupt) as exc:
            refusal = f"refused: {exc}"
            logger.error("%s: the order to promote version %d is %s", self._target, order.version, refusal)
        for each, _ in orders:
            self._control.put(each, None, refusal or None)

    def align(self) -> bool:
        """Let the aliases say what the log says. Return whether challengers can be compared with what serves."""
        champion, named = self._control.state.champion, self._intact("champion")
        if champion is None:
            self._serving = None
            return named is None or self._accept(named, "it is called champion, and the control log knew of none")
        is_named = named is not None and named.version == champion.version
        chosen = named if is_named else find_version(self._registry, champion.version)
        if chosen is not None and champion.digest not in (None, digest(chosen.manifest)):
            return self._complain(f"version {champion.version} of the registry is not the snapshot that was promoted")
        judgement = chosen.judgement if chosen is not None else None
        is_done = judgement is not None and (judgement.state, judgement.promotion) == ("promoted", champion.promotion)
        is_by_hand = named is not None and not is_named and (is_done or chosen is None)
        if self._control.state.champion != champion:
            return False  # `meanwhile` has obeyed an order, which came after the alias was moved
        if named is not None and is_by_hand and self._signing.trusted_keys is None:
            return self._accept(named, "its alias was moved by hand")
        if chosen is None:
            return self._complain(f"no champion is named any more: version {champion.version} was deleted")
        if is_by_hand:
            logger.warning("%s: the alias of the champion was moved by hand, and is moved back", self._target)
        if not is_named or not is_done:
            self._carry_out(champion, chosen)
        self._serving, self._problem, self._known[champion.version] = chosen, None, chosen
        if champion.previous not in self._known and (previous := self._intact(champion.previous)) is not None:
            self._known[previous.version] = previous
        self._metrics.set("omnidraft_champion_version_info", champion.version)
        return self._control.state.champion == champion  # else an order came meanwhile

    def _promote(self, version: SnapshotVersion, judgement: Judgement, *, after: str | None) -> bool:
        """Carry out the four steps, unless the champion is another by then. Return whether it was promoted."""
        promotion = uuid.uuid4().hex
        promoting = judgement.model_copy(update={"state": "promoting", "promotion": promotion})
        self._registry.annotate(version.version, promoting.notes())  # step 1
        self.obey()
        if self._control.promotion != after:
            overtaken = judgement.model_copy(update={"state": "refused", "reason": "an order came first"})
            former = version.judgement if not is_open(version) else None
            self._registry.annotate(version.version, (former or overtaken).notes())
            return False
        self._put(version, promotion, judgement.reason)  # step 2
        self.align()
        return True

    def _promote_again(self, version: SnapshotVersion, reason: str, *, after: str | None) -> None:
        self._promote(version, Judgement(state="promoting", reason=reason), after=after)

    def _put(self, version: SnapshotVersion, promotion: str, reason: str, *, is_ordered: bool = False) -> None:
        """Step 2: from here on it serves. Raises SnapshotCorrupt where snapshots are signed, and this one is not."""
        self._signing.require(version.manifest)
        before, number = self._control.state.champion, version.version
        previous = None if before is None else before.previous if before.version == number else before.version
        chosen = Champion(version=number, digest=digest(version.manifest), promotion=promotion, previous=previous)
        self._control.put_champion(chosen.model_copy(update={"is_ordered": is_ordered}), reason)
        self._known = {each: self._known[each] for each in self._known if each == previous} | {number: version}
        if before is not None and number < before.version:
            self._metrics.add("omnidraft_rollbacks_total")
        logger.info("%s: version %d serves: %s", self._target, number, reason or "an operator ordered it")

    def _carry_out(self, champion: Champion, chosen: SnapshotVersion) -> None:
        """Steps 3 and 4."""
        previous = self._intact(champion.previous)
        self._control.require()  # which `meanwhile` may have lost
        self._registry.promote(champion.version, previous.version if previous and previous.is_servable else None)
        judgement = chosen.judgement
        if judgement is None or judgement.promotion != champion.promotion:
            reason, by = self._control.state.entries[("champion",)].reason or "", champion.is_ordered
            judgement = Judgement(state="promoted", reason=reason, promotion=champion.promotion, is_ordered=by)
        self._registry.annotate(champion.version, judgement.model_copy(update={"state": "promoted"}).notes())

    def _accept(self, named: SnapshotVersion, reason: str) -> bool:
        """Let the version serve that the alias names, as ordered by whoever moved it; where values are signed, ask."""
        if self._signing.trusted_keys is not None:
            return self._complain(f"version {named.version} is called champion, which nobody signed")
        known = None if self._control.promotion else named.judgement  # else the log was lost, or begins
        if known is not None and known.promotion is not None:
            self._put(named, known.promotion, known.reason, is_ordered=known.is_ordered)
        else:
            self._put(named, uuid.uuid4().hex, reason, is_ordered=True)
        return self.align()

    def _intact(self, name: str | int | None) -> SnapshotVersion | None:
        """Return the version of this name; None without one, and for one that is damaged."""
        with suppress(SnapshotCorrupt):
            return None if name is None else find_version(self._registry, name)
        return None

    def _complain(self, problem: str) -> bool:
        """Say once that challengers cannot be compared, until it is mended."""
        if problem != self._problem:
            logger.error(
                "%s: %s; say which version serves: `omnidraft snapshots promote VERSION`", self._target, problem
            )
            self._metrics.add("omnidraft_champions_refused_total")
        self._problem, self._serving = problem, None
        return False

    def _settle(self, verdict: Verdict | None) -> None:
        """Carry a verdict of the judge out."""
        if verdict is None:
            return
        version, decision, number = verdict.challenger, verdict.decision, verdict.challenger.version
        if not decision.promote:
            self._registry.annotate(number, verdict.judgement.notes())
        elif not self._promote(version, verdict.judgement, after=verdict.after):
            return
        self._rewinds.count(version.manifest, is_setback=decision.is_setback)
        self._metrics.add("omnidraft_promotions_total" if decision.promote else "omnidraft_refusals_total")
        logger.info("%s: version %d is %s", self._target, number, verdict.judgement)

    def _read_traffic(self) -> None:
        """Announce the drifts in new requests, and let the judge count them for a canary."""
        canaries, champion = self._judge.canaries, self._control.state.champion
        if canaries is None:
            return
        self._recovery.announce()
        for request in self._traffic.new():
            self._judge.update(request)
            if request.version not in canaries or (champion and champion.version == request.version):
                self._recovery.update(request)
