"""The promotion of a challenger: the offline gate over held-out records. A canary may follow (canary_trial.py).

A drafter can make the service slower, never wrong; so a challenger must show on held-out records that it is not worse.
In the gate each tenant weighs alike and none may fall (tenant_gate.py), and nothing may fall on the pinned file.
See docs/algorithms.md, section 11.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, prod, sqrt
from statistics import NormalDist

from omnidraft.config import ControllerSettings
from omnidraft.fleet.tenant_gate import Change, change_without_best, equal_weight_change, fallen_tenants
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.snapshots.manifest import Manifest
from omnidraft.snapshots.signing import SnapshotSigning

_PAIR = {"target", "drafter", "drafter_hash", "alignment"}
_UNPAIRED_DOUBT = "other records show only large gains for sure: promote it by hand if it shall serve nonetheless"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to promote, and why."""

    promote: bool
    reason: str
    is_setback: bool = False
    """Whether learning is to go back to the champion after some of these in a row: it measured worse than the
    tolerance, however uncertain that is, or neither it nor what follows can be compared with the champion. Not, where
    too little was measured."""
    gain: float | None = None
    """The change of held-out agreement from the champion; None: not measured."""
    gain_error: float | None = None
    """The standard error of the gain; None: not known."""


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of held-out agreement from the champion to the challenger."""

    estimate: float
    error: float | None
    """The standard error of the estimate; None when it is unknown."""
    against: str
    is_paired: bool = True
    """Whether both were measured on the same records."""

    def bound(self, confidence: float) -> float | None:
        """Return the lower confidence bound of the change; None when the standard error is unknown."""
        if confidence <= 0.5:
            return self.estimate
        return None if self.error is None else self.estimate - NormalDist().inv_cdf(confidence) * self.error

    def __str__(self) -> str:
        interval = "" if self.error is None else f" +- {NormalDist().inv_cdf(0.975) * self.error:.4f} (95 %)"
        return f"{self.estimate:+.4f}{interval} {self.against}"


def decide_first(
    challenger: SnapshotVersion, versions: Sequence[SnapshotVersion], settings: ControllerSettings
) -> Decision:
    """Decide about a challenger where there is no champion, so the base drafter serves: it is compared with that.

    Args:
        versions: all of the pair, the challenger among them.
    """
    others = [each for each in versions if each.version != challenger.version]
    if promoted := [each.version for each in others if each.judgement and each.judgement.state == "promoted"]:
        lost = f"the registry names no champion, but version {promoted[-1]} was promoted before"
        return Decision(False, f"{lost}; say which one serves: `omnidraft snapshots promote VERSION`")
    manifest = challenger.manifest
    if manifest.train == "base" and manifest.parent_id is None:
        return Decision(True, "the first snapshot of this pair")
    unpublished = Manifest(**manifest.model_dump(include=_PAIR), snapshot_id="base", created_ms=0)
    base = next((each.manifest for each in others if _is_base_of(each.manifest, manifest)), unpublished)
    return decide(manifest, base, settings, between=lineage_between(versions, manifest, base))


def decide(
    challenger: Manifest,
    champion: Manifest,
    settings: ControllerSettings,
    *,
    between: Sequence[Manifest] = (),
    history: Sequence[Manifest] = (),
) -> Decision:
    """Decide whether the challenger's held-out agreement is at least the champion's, less the tolerance, with the
    confidence of the settings, and the predicted speed-up too; and that no tenant's fell, nor that on the pinned file.

    - A challenger that was not measured is refused: nothing shows that it is not worse.
    - One that descends from the champion is judged by the sum of the changes since, each measured before and after
      on the same records. A snapshot in between that was not measured counts as no change.
    - One without a parent was trained offline from the base drafter; if that is the champion, it is judged likewise.
    - One that agrees exactly as before, on every record, is refused, unless the tolerance allows for less or a tenant
      was forgotten in it: nothing is gained.
    - One that does not descend from it is judged by its agreement against the champion's, on different records, whose
      errors are independent and far larger; it is refused when the champion's agreement is unknown.

    Args:
        between: the snapshots from the champion's child to the challenger's parent, oldest first.
        history: the champion and its ancestors, newest first.
    """
    if challenger.agreement_after is None or challenger.agreement_before is None or challenger.held_out_records == 0:
        return Decision(False, "no held-out records: nothing shows that it is not worse than the champion")
    change = _change_from(champion, challenger, between)
    if change is None:
        reason = "the champion is no ancestor and was never measured, so they cannot be compared"
        return Decision(False, reason, is_setback=True)
    verdict = f"held-out agreement {challenger.agreement_after:.4f} on {challenger.held_out_records} records, {change}"
    is_same = change.estimate == 0 and not change.error and set(challenger.forgets) <= set(champion.forgets)
    if is_same and not settings.tolerance:
        return Decision(False, f"{verdict}: no difference", gain=change.estimate, gain_error=change.error)
    bound = change.bound(settings.confidence)
    if bound is None:
        reason = f"{verdict}, too few requests to be {settings.confidence:.0%} sure of anything"
        return Decision(False, reason, gain=change.estimate)
    lineage = [*between, challenger]
    falls = _falls(champion, lineage, history, settings)
    rest = _fall_of_others(champion, lineage, settings)
    speedup = _predicted_speedup(lineage)
    is_enough = bound >= -settings.tolerance - 1e-9  # a sum of rounded differences
    is_fast = speedup is None or speedup >= 1 - settings.speed_tolerance
    speed = "" if speedup is None else f", foretold speed {speedup:.3f} of before"
    bounds = f"tolerance {settings.tolerance:.4f}, confidence {settings.confidence:.0%}"
    is_setback = bool(falls) or change.estimate < -settings.tolerance
    doubts = [] if is_enough or is_setback or change.is_paired else [_UNPAIRED_DOUBT]
    reason = "; ".join([f"{verdict}{speed}, {bounds}", *doubts, *falls, *rest])
    is_better = is_enough and is_fast and not falls and not rest
    return Decision(is_better, reason, is_setback, change.estimate, change.error)


def _fall_of_others(champion: Manifest, lineage: Sequence[Manifest], settings: ControllerSettings) -> list[str]:
    """Return that the mean of all tenants but the one that gained most fell, if it did."""
    rest = change_without_best(lineage) if _descends(champion, lineage[0]) else None
    if rest is None or rest.estimate >= -settings.tolerance - 1e-9:
        return []
    return [f"without the tenant that gained most the mean fell by {-rest.estimate:.4f}"]


def _descends(champion: Manifest, oldest: Manifest) -> bool:
    return champion.snapshot_id == oldest.parent_id or (oldest.parent_id is None and _is_base_of(champion, oldest))


def _falls(
    champion: Manifest, lineage: Sequence[Manifest], history: Sequence[Manifest], settings: ControllerSettings
) -> list[str]:
    """Return what fell, whatever the mean of the tenants is: tenants, and the agreement on the pinned file."""
    descends = _descends(champion, lineage[0])
    fallen = fallen_tenants(
        lineage if descends else (),
        history,
        tolerance=settings.tolerance,
    )
    pinned_before, pinned = _pinned_before(champion, lineage[0], descends=descends), lineage[-1].pinned
    if pinned is None or pinned_before is None or pinned.sha256 != pinned_before[0]:
        return [str(each) for each in fallen]
    change = pinned.after - pinned_before[1]
    has_fallen = change < -settings.tolerance - 1e-9
    return [*map(str, fallen), *([f"agreement on the pinned file fell by {-change:.4f}"] if has_fallen else [])]


def _pinned_before(champion: Manifest, oldest: Manifest, *, descends: bool) -> tuple[str, float] | None:
    """Return the hash of a pinned file and the champion's agreement on it; None when it was not measured."""
    if champion.pinned is not None:
        return champion.pinned.sha256, champion.pinned.after
    return (oldest.pinned.sha256, oldest.pinned.before) if descends and oldest.pinned is not None else None


def _predicted_speedup(lineage: Sequence[Manifest]) -> float | None:
    """Return the speed after the last of these snapshots relative to before the first; None without measured times."""
    ratios = [
        each.speedup_after / each.speedup_before for each in lineage if each.speedup_before and each.speedup_after
    ]
    return prod(ratios) if ratios else None


def _change_from(champion: Manifest, challenger: Manifest, between: Sequence[Manifest]) -> _Change | None:
    """Return the change between the two, or None when they cannot be compared."""
    lineage = [*between, challenger]
    if lineage[0].parent_id == champion.snapshot_id:
        return _sum(lineage, f"against the champion over {len(lineage)} snapshot(s), each on the same records")
    if challenger.parent_id is None and _is_base_of(champion, challenger):
        return _sum([challenger], "against the base drafter, which is the champion, on the same records")
    return _unpaired_change(champion, challenger)


def _unpaired_change(champion: Manifest, challenger: Manifest) -> _Change | None:
    """Return the difference of the two agreements, each measured on its own records; None when one is unknown."""
    before, after = _requests_behind(champion), _requests_behind(challenger)
    if champion.agreement_after is None or challenger.agreement_after is None or not before or not after:
        return None
    estimate = challenger.agreement_after - champion.agreement_after
    error = hypot(_error(champion.agreement_after, before), _error(challenger.agreement_after, after))
    requests = f"{after} and {before} requests"
    return _Change(estimate, error, f"against the champion, which is no ancestor, on other records ({requests})", False)


def _requests_behind(manifest: Manifest) -> int:
    """Return the number of held-out requests; that of records, which may be several of one request, where tenants are
    not told."""
    return sum(each.num_requests for each in manifest.tenants) or manifest.held_out_records


def _error(agreement: float, num_requests: int) -> float:
    """Return a standard error of an agreement, from above: no two requests can differ more than when one agrees
    everywhere and the other nowhere. Tokens of one request are alike, so they do not count.

    With two requests more on each side, lest one that agrees everywhere be taken for certain. Source: Agresti and
    Coull, The American Statistician 52 (1998).
    """
    share = (agreement * num_requests + 2) / (num_requests + 4)
    return sqrt(share * (1 - share) / num_requests)


def _sum(lineage: Sequence[Manifest], against: str) -> _Change:
    """Sum the changes of one snapshot after another, whose errors are taken as independent."""
    changes = list(map(_change, lineage))
    known = [each.error for each in changes if each.error is not None]
    error = sqrt(sum(each**2 for each in known)) if len(known) == len(changes) else None
    return _Change(sum(each.estimate for each in changes), error, against)


def _is_base_of(champion: Manifest, challenger: Manifest) -> bool:
    return champion.train == "base" and champion.parent_id is None and champion.drafter_hash == challenger.drafter_hash


def _change(manifest: Manifest) -> Change:
    """Return the change from the snapshot's parent, the mean over tenants where it tells them."""
    if (change := equal_weight_change(manifest)) is not None:
        return change
    if manifest.agreement_after is None or manifest.agreement_before is None:
        return Change(0.0, manifest.agreement_change_error)
    return Change(manifest.agreement_after - manifest.agreement_before, manifest.agreement_change_error)


def lineage_between(versions: Sequence[SnapshotVersion], challenger: Manifest, champion: Manifest) -> list[Manifest]:
    """Return the snapshots from the champion's child to the challenger's parent, oldest first; empty when the
    challenger does not descend from the champion."""
    by_id = {version.manifest.snapshot_id: version.manifest for version in versions}
    between: list[Manifest] = []
    parent_id = challenger.parent_id
    while parent_id != champion.snapshot_id:
        if parent_id is None or (parent := by_id.pop(parent_id, None)) is None:
            return []
        between.insert(0, parent)
        parent_id = parent.parent_id
    return between


def believed_versions(registry: Registry, signing: SnapshotSigning, newest: int | None = None) -> list[SnapshotVersion]:
    """Return the versions whose measurements may be believed: the signed ones, or all where nothing is signed; of these
    many newest ones if a number is given. Raises RegistryError."""
    return [each for each in registry.versions(newest) if signing.trusts(each.manifest)]


def lineage_to(versions: Sequence[SnapshotVersion], newest: Manifest, most: int) -> list[Manifest]:
    """Return this snapshot and its ancestors, newest first, `most` at most."""
    by_id = {version.manifest.snapshot_id: version.manifest for version in versions}
    lineage: list[Manifest] = []
    at = by_id.pop(newest.snapshot_id, None)
    while at is not None and len(lineage) < most:
        lineage.append(at)
        at = by_id.pop(at.parent_id, None) if at.parent_id else None
    return lineage
