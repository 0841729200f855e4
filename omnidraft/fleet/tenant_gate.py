"""The tenants' part of the promotion gate: each weighs alike, the mean holds without the one that gained most, and none
may fall by more than its error.

A tenant's change is a mean over few requests (snapshots/significance.py). All tenants are tested together, over the
snapshots since the champion and over longer lineages, in which many falls too small to show add up; the levels are
those of Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979). A
tenant that rose since the champion has not fallen, whatever was before. Changes of several snapshots are taken as
independent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from omnidraft.snapshots.manifest import LEAST_TENANT_REQUESTS, Manifest, TenantAgreement
from omnidraft.stats import p_value

TENANT_CONFIDENCE = 0.8
"""A challenger on which a tenant's agreement fell by more than the tolerance is refused, when that is so sure over all
tenants together. Lower protects tenants more, and refuses more snapshots by chance: with 0.8 one of five at most."""
LINEAGES = (0, 4, 16)
"""Numbers of snapshots up to the champion that are tested together with those since."""
MOST_HISTORY = max(LINEAGES)


@dataclass(frozen=True, slots=True)
class Change:
    """The change of agreement over some snapshots."""

    estimate: float
    error: float | None
    """The standard error of the estimate; None when it is unknown."""


@dataclass(frozen=True, slots=True)
class TenantFall:
    """A tenant on whose requests agreement fell."""

    tenant: str | None
    change: Change
    """The change of the lineage that shows it best."""
    num_snapshots: int

    def __str__(self) -> str:
        name = "the small tenants together" if self.tenant is None else f"tenant {self.tenant!r}"
        return f"{name} fell by {-self.change.estimate:.4f} over {self.num_snapshots} snapshot(s)"


@dataclass(frozen=True, slots=True)
class _Test:
    """The test of one tenant over one lineage."""

    fall: TenantFall
    p_value: float


def equal_weight_change(manifest: Manifest) -> Change | None:
    """Return the mean change of the tenants, each weighing alike; None for a snapshot that does not tell tenants.

    Small tenants count only together, and only with as many requests as one that counts alone, if there is one.
    """
    voters = [each for each in manifest.tenants if each.num_requests >= LEAST_TENANT_REQUESTS] or manifest.tenants
    if not voters:
        return None
    return Change(fmean(map(_estimate, voters)), _scaled(_root_sum(each.change_error for each in voters), len(voters)))


def change_without_best(since: Sequence[Manifest]) -> Change | None:
    """Return the mean change since the champion of all tenants but the one that gained most, each weighing alike, so
    that its gain, however large, pays for nobody's loss. None with fewer than two tenants.

    Args:
        since: the snapshots from the champion's child to the challenger.
    """
    measured = [_tenant_change(name, since) for name in _names(since)]
    voters = [change for change, num_requests in measured if num_requests >= LEAST_TENANT_REQUESTS]
    others = sorted(voters, key=lambda each: each.estimate)[:-1]
    if not others:
        return None
    error = _scaled(_root_sum(each.error for each in others), len(others))
    return Change(fmean(each.estimate for each in others), error)


def fallen_tenants(
    since: Sequence[Manifest], history: Sequence[Manifest], *, tolerance: float, confidence: float = TENANT_CONFIDENCE
) -> list[TenantFall]:
    """Return the tenants whose agreement fell by more than the tolerance, as surely as `confidence` says for all
    tenants together.

    Args:
        since: the snapshots from the champion's child to the challenger.
        history: the champion and its ancestors, newest first.
    """
    own = {name: _tenant_change(name, since) for name in _names(since)}
    falling = {name for name, (change, _) in own.items() if change.estimate < -tolerance - 1e-9}
    tests = [test for name in own for test in _tests(name, since, history, tolerance)]
    falls: dict[str | None, TenantFall] = {}
    for rank, test in enumerate(sorted(tests, key=lambda each: each.p_value)):
        if test.p_value > (1 - confidence) / (len(tests) - rank):
            break
        if test.fall.tenant in falling:
            falls.setdefault(test.fall.tenant, test.fall)
    return list(falls.values())


def _tests(
    name: str | None, since: Sequence[Manifest], history: Sequence[Manifest], tolerance: float
) -> Iterable[_Test]:
    """Yield the test over each lineage of another length that tells this tenant's error."""
    lengths = sorted({min(length, len(history)) for length in LINEAGES})
    for length in lengths:
        lineage = [*since, *history[:length]]
        change, num_requests = _tenant_change(name, lineage)
        if change.error is not None:
            chance = p_value(-change.estimate - tolerance, change.error, num_requests - 1)
            yield _Test(TenantFall(name, change, len(lineage)), chance)


def _tenant_change(name: str | None, lineage: Sequence[Manifest]) -> tuple[Change, int]:
    """Return the summed change of a tenant, and the fewest requests that one of its changes rests on."""
    measured = [each for manifest in lineage for each in manifest.tenants if each.tenant == name]
    change = Change(sum(map(_estimate, measured)), _root_sum(each.change_error for each in measured))
    return change, min((each.num_requests for each in measured), default=0)


def _names(lineage: Sequence[Manifest]) -> list[str | None]:
    return list(dict.fromkeys(each.tenant for manifest in lineage for each in manifest.tenants))


def _estimate(measured: TenantAgreement) -> float:
    return measured.after - measured.before


def _root_sum(errors: Iterable[float | None]) -> float | None:
    squares = [None if error is None else error**2 for error in errors]
    known = [each for each in squares if each is not None]
    return sqrt(sum(known)) if known and len(known) == len(squares) else None


def _scaled(error: float | None, number: int) -> float | None:
    return None if error is None else error / number
