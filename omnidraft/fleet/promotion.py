"""When a challenger becomes the champion, and telling the fleet.

A drafter can make the service slower, never wrong; so a challenger must show on held-out records that it is not worse.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

from omnidraft.config import ControllerSettings
from omnidraft.errors import BusError, SnapshotError, SnapshotNotFound
from omnidraft.fleet import announcements
from omnidraft.ports import LogWriter, Metrics, Registry, SnapshotVersion
from omnidraft.snapshots.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """A judgement and why."""

    promote: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Change:
    """Of held-out agreement, from the champion to the challenger."""

    estimate: float
    error: float | None
    """Its standard error, where it is known."""
    against: str

    def least(self, confidence: float) -> float | None:
        """What it is at least, with this confidence; None when that cannot be said."""
        if confidence <= 0.5:
            return self.estimate
        return None if self.error is None else self.estimate - NormalDist().inv_cdf(confidence) * self.error

    def __str__(self) -> str:
        interval = "" if self.error is None else f" +- {NormalDist().inv_cdf(0.975) * self.error:.4f} (95 %)"
        return f"{self.estimate:+.4f}{interval} {self.against}"


def decide(
    challenger: Manifest, champion: Manifest | None, settings: ControllerSettings, *, between: Sequence[Manifest] = ()
) -> Decision:
    """Is the challenger's held-out agreement at least the champion's, less the tolerance, as surely as is asked?

    - The first snapshot of a pair is promoted: there is nothing to lose.
    - A challenger that was not measured is refused: nothing shows that it is not worse.
    - One that descends from the champion is judged by the sum of the changes since, each measured before and after
      on the same records. A snapshot between that was not measured counts as no change.
    - One without a parent was learned offline from the base drafter; if that is the champion, it is judged likewise.
    - One that does not descend from it is judged by its agreement against the champion's, on different records, and
      refused when the champion's is unknown.

    Args:
        between: the snapshots from the champion's child to the challenger's parent, oldest first.
    """
    if champion is None:
        return Decision(True, "the first snapshot of this pair")
    if challenger.agreement_after is None or challenger.agreement_before is None or challenger.held_out_records == 0:
        return Decision(False, "no held-out records: nothing shows that it is not worse than the champion")
    change = _change_from(champion, challenger, between)
    if change is None:
        return Decision(False, "the champion is no ancestor and was never measured, so they cannot be compared")
    verdict = f"held-out agreement {challenger.agreement_after:.4f} on {challenger.held_out_records} records, {change}"
    least = change.least(settings.confidence)
    if least is None:
        return Decision(False, f"{verdict}, too few requests to be {settings.confidence:.0%} sure of anything")
    is_enough = least >= -settings.tolerance - 1e-9  # a sum of rounded differences
    return Decision(is_enough, f"{verdict}, tolerance {settings.tolerance:.4f}, confidence {settings.confidence:.0%}")


def _change_from(champion: Manifest, challenger: Manifest, between: Sequence[Manifest]) -> _Change | None:
    """None when nothing connects the two."""
    lineage = [*between, challenger]
    if lineage[0].parent_id == champion.snapshot_id:
        return _sum(lineage, f"against the champion over {len(lineage)} snapshot(s), each on the same records")
    if challenger.parent_id is None and _is_base_of(champion, challenger):
        return _sum([challenger], "against the base drafter, which is the champion, on the same records")
    if champion.agreement_after is None or challenger.agreement_after is None:
        return None
    estimate = challenger.agreement_after - champion.agreement_after
    return _Change(estimate, None, "against the champion, which is no ancestor, on other records")


def _sum(lineage: Sequence[Manifest], against: str) -> _Change:
    """Errors of one snapshot after another, taken as independent."""
    errors = [manifest.agreement_change_error for manifest in lineage]
    known = [error for error in errors if error is not None]
    error = sqrt(sum(each**2 for each in known)) if len(known) == len(errors) else None
    return _Change(sum(map(_change, lineage)), error, against)


def _is_base_of(champion: Manifest, challenger: Manifest) -> bool:
    return champion.train == "base" and champion.parent_id is None and champion.drafter_hash == challenger.drafter_hash


def _change(manifest: Manifest) -> float:
    if manifest.agreement_after is None or manifest.agreement_before is None:
        return 0.0
    return manifest.agreement_after - manifest.agreement_before


def lineage_between(versions: Sequence[SnapshotVersion], challenger: Manifest, champion: Manifest) -> list[Manifest]:
    """From the champion's child to the challenger's parent, oldest first; empty when there is no such line."""
    by_id = {version.manifest.snapshot_id: version.manifest for version in versions}
    between: list[Manifest] = []
    parent_id = challenger.parent_id
    while parent_id != champion.snapshot_id:
        if parent_id is None or (parent := by_id.pop(parent_id, None)) is None:
            return []
        between.insert(0, parent)
        parent_id = parent.parent_id
    return between


class Controller:
    """Judges every challenger of one pair once, moves `champion`, announces it.

    Order: write down why, promote, announce. The alias is the truth, and the champion is announced once after every
    start and whenever it is not the one announced last; so a controller killed in between, or an alias moved by hand,
    is made good by the next step. Saying it twice does no harm.
    """

    def __init__(
        self,
        registry: Registry,
        control_writer: LogWriter,
        settings: ControllerSettings,
        metrics: Metrics,
        *,
        target: str,
        drafter: str,
    ) -> None:
        """`target` and `drafter` are the pair of this registry."""
        self._registry = registry
        self._target, self._drafter = target, drafter
        self._writer = control_writer
        self._settings = settings
        self._metrics = metrics
        self._judged: int | None = None
        self._announced: int | None = None

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
        challenger = self._find("challenger")
        champion = self._find("champion")
        if (
            challenger
            and challenger.version != self._judged
            and not (champion and champion.version == challenger.version)
        ):
            self._judge(challenger, champion)
            self._judged = challenger.version
            champion = self._find("champion")
        if champion and champion.version != self._announced:
            self._announce(champion.version)

    def _announce(self, version: int) -> None:
        announcements.announce(self._writer, version, target=self._target, drafter=self._drafter)
        if self._announced is not None and version < self._announced:
            self._metrics.add("omnidraft_rollbacks_total")
        self._announced = version
        logger.info("announced champion %d of %s for %s", version, self._drafter, self._target)

    def _judge(self, challenger: SnapshotVersion, champion: SnapshotVersion | None) -> None:
        decision = self._decide(challenger.manifest, champion.manifest if champion else None)
        verdict = "promoted" if decision.promote else "refused"
        self._registry.annotate(challenger.version, {"judgement": f"{verdict}: {decision.reason}"})
        self._registry.log_metrics(challenger.version, {"promoted": float(decision.promote)}, challenger.version)
        if decision.promote:
            self._registry.promote(challenger.version)
        self._metrics.add("omnidraft_promotions_total" if decision.promote else "omnidraft_refusals_total")
        logger.info("%s version %d for %s: %s", verdict, challenger.version, self._target, decision.reason)

    def _decide(self, challenger: Manifest, champion: Manifest | None) -> Decision:
        between = lineage_between(self._registry.versions(), challenger, champion) if champion else []
        return decide(challenger, champion, self._settings, between=between)

    def _find(self, alias: str) -> SnapshotVersion | None:
        try:
            return self._registry.resolve(alias)
        except SnapshotNotFound:
            return None
