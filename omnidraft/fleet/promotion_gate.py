"""The offline promotion gate: whether a challenger may serve, by its measurements on held-out records.

A drafter can make the service slower, never wrong; so a challenger must show on held-out records that it is not worse.
See docs/algorithms.md, section 11.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from statistics import NormalDist

from omnidraft.config import ControllerSettings
from omnidraft.ports import SnapshotVersion
from omnidraft.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to promote, and why."""

    promote: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of held-out agreement from the champion to the challenger."""

    estimate: float
    error: float | None
    """The standard error of the estimate; None when it is unknown."""
    against: str

    def bound(self, confidence: float) -> float | None:
        """Return the lower confidence bound of the change; None when the standard error is unknown."""
        if confidence <= 0.5:
            return self.estimate
        return None if self.error is None else self.estimate - NormalDist().inv_cdf(confidence) * self.error

    def __str__(self) -> str:
        interval = "" if self.error is None else f" +- {NormalDist().inv_cdf(0.975) * self.error:.4f} (95 %)"
        return f"{self.estimate:+.4f}{interval} {self.against}"


def decide(
    challenger: Manifest, champion: Manifest | None, settings: ControllerSettings, *, between: Sequence[Manifest] = ()
) -> Decision:
    """Decide whether the challenger's held-out agreement is at least the champion's, less the tolerance, with the
    confidence of the settings, and the predicted speed-up too.

    - The first snapshot of a pair is promoted: there is nothing to lose.
    - A challenger that was not measured is refused: nothing shows that it is not worse.
    - One that descends from the champion is judged by the sum of the changes since, each measured before and after
      on the same records. A snapshot in between that was not measured counts as no change.
    - One without a parent was trained offline from the base drafter; if that is the champion, it is judged likewise.
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
    bound = change.bound(settings.confidence)
    if bound is None:
        return Decision(False, f"{verdict}, too few requests to be {settings.confidence:.0%} sure of anything")
    speedup = _predicted_speedup([*between, challenger])
    is_enough = bound >= -settings.tolerance - 1e-9  # a sum of rounded differences
    is_fast = speedup is None or speedup >= 1 - settings.speed_tolerance
    speed = "" if speedup is None else f", foretold speed {speedup:.3f} of before"
    bounds = f"tolerance {settings.tolerance:.4f}, confidence {settings.confidence:.0%}"
    return Decision(is_enough and is_fast, f"{verdict}{speed}, {bounds}")


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
    if champion.agreement_after is None or challenger.agreement_after is None:
        return None
    estimate = challenger.agreement_after - champion.agreement_after
    return _Change(estimate, None, "against the champion, which is no ancestor, on other records")


def _sum(lineage: Sequence[Manifest], against: str) -> _Change:
    """Sum the changes of one snapshot after another, whose errors are taken as independent."""
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
