"""Which tenants' factors serve, and how much is drafted for them, follows the control log."""

import pytest

from omnidraft.decode.drafting.loaded_factors import LoadedFactors
from omnidraft.decode.snapshot.slot import Canary, LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.tenant_rules import TenantRules
from omnidraft.ports import ControlValue, Drift, FactorsOff, Forget
from omnidraft.testing.memory_log import MemoryLog
from tests.control_logs import control_over
from tests.snapshot_folders import manifest


class Fleet:
    """A control log, which another pair's process writes to, and the rules of a worker."""

    def __init__(self) -> None:
        self._log, self.rules = MemoryLog(1), TenantRules(2)

    def put(self, key: tuple[str, ...], value: ControlValue | None) -> None:
        control_over(self._log, target="huge").put(key, value)
        self.rules.state = control_over(self._log).read_whole()


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_an_operator_turns_one_tenants_factors_off_and_on_for_every_pair(fleet):
    made = manifest("s")
    fleet.put(("factors", "a"), FactorsOff())
    assert [fleet.rules.serves_factors(tenant, made) for tenant in ("a", "b")] == [False, True]
    fleet.put(("factors", "a"), None)
    assert fleet.rules.serves_factors("a", made)


def test_a_forgotten_tenants_factors_serve_again_only_in_snapshots_that_carried_out_the_newest_order(fleet):
    fleet.put(("forget", "a"), Forget(id="one", until_ms=1))
    fleet.put(("forget", "a"), Forget(id="two", until_ms=2))
    before, half, after = (manifest("s", forgets=names) for names in ((), ("one",), ("one", "two")))
    assert [fleet.rules.serves_factors("a", each) for each in (before, half, after)] == [False, False, True]
    assert fleet.rules.serves_factors("b", before)


def test_less_is_drafted_for_traffic_of_a_kind_that_drifts_alone():
    rules, log = TenantRules(2), MemoryLog(1)
    for work in ("text", "constrained", "text"):
        control_over(log).put(("drift", "a", work), Drift(level=0.7))
    control_over(log).put(("drift", "a", "constrained"), None)
    rules.state = control_over(log).read_whole()
    traffic = [("a", "text"), ("a", "constrained"), ("a", "tools"), ("b", "text")]
    assert [rules.limit(*each, 5) for each in traffic] == [2, 5, 5, 5]
    assert rules.limit("a", "text", 1) == 1


def test_every_loaded_snapshot_frees_what_was_forgotten(fleet):
    def loaded(version: int, **fields: object) -> LoadedSnapshot:
        factors = LoadedFactors({"a": lambda: None, "b": lambda: None})
        return LoadedSnapshot(version, "s", None, None, manifest("s", **fields), factors=factors)

    current, canary = loaded(2), loaded(3, forgets=("one",))
    slot = SnapshotSlot(previous := loaded(1), fleet.rules)
    slot.swap(current)
    slot.set_canary(Canary(canary, 0.5))
    fleet.put(("forget", "a"), Forget(id="one", until_ms=1))
    slot.forget_factors()
    assert [each.factors.tenants for each in (previous, current, canary)] == [{"b"}, {"b"}, {"a", "b"}]
