"""A tenant whose traffic falls chooses no champion that the other tenants lose by."""

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.fleet.drift_recovery import objection
from omnidraft.ports import SnapshotVersion
from omnidraft.snapshots.manifest import Manifest
from tests.snapshot_folders import manifest
from tests.unit.fleet.test_tenant_gate import snapshot, tenant

SETTINGS = ControllerSettings()


def versions(*manifests: Manifest) -> list[SnapshotVersion]:
    return [SnapshotVersion(number, each, (), 0) for number, each in enumerate(manifests, 1)]


def judged(candidate: int, champion: int, *manifests: Manifest) -> str | None:
    known = versions(*manifests)
    return objection(known[candidate - 1], known[champion - 1], known, SETTINGS, tenant="mallory")


BASE = manifest("base")
LEARNED = snapshot(1, tenant("mallory", -0.2), tenant("acme", 0.2))
NEUTRAL = snapshot(1, tenant("mallory", -0.2), tenant("acme", 0.005))


@pytest.mark.parametrize(
    ("learned", "may_return"),
    [(LEARNED, False), (NEUTRAL, True)],
    ids=["what others gained would be lost", "nobody else would lose"],
)
def test_going_back_undoes_no_gain_of_the_others(learned: Manifest, may_return: bool) -> None:
    against = judged(1, 2, BASE, learned)
    assert (against is None) is may_return
    assert may_return or "tenant 'acme' fell by 0.2000" in str(against)


def test_over_several_snapshots_the_gains_are_summed() -> None:
    small = [snapshot(n, tenant("acme", 0.008), parent=f"s{n - 1}" if n > 1 else "base") for n in range(1, 10)]
    assert judged(9, 10, BASE, *small) is None
    assert judged(1, 10, BASE, *small) is not None


def test_a_refused_snapshot_does_not_come_in_by_the_back_door() -> None:
    """It learned the flooder's poison, so it agrees best with his newest records."""
    poisoned = snapshot(2, tenant("mallory", 0.4), tenant("acme", -0.2), parent="s1")
    against = judged(3, 2, BASE, NEUTRAL, poisoned)
    assert against is not None
    assert "tenant 'acme' fell" in against
    better = snapshot(2, tenant("mallory", 0.4), tenant("acme", 0.01), parent="s1")
    assert judged(3, 2, BASE, NEUTRAL, better) is None


def test_a_snapshot_of_another_lineage_does_not_return() -> None:
    other = snapshot(2, tenant("mallory", 0.4), tenant("acme", 0.4))
    assert "neither descends" in str(judged(3, 2, BASE, NEUTRAL, other))
