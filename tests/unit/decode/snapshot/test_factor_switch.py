"""Which tenants' factors serve follows the operator's and the forgetting's announcements."""

import pytest

from omnidraft.decode.drafting.loaded_factors import LoadedFactors
from omnidraft.decode.snapshot.slot import Canary, FactorSwitch, LoadedSnapshot, SnapshotSlot
from omnidraft.fleet.control_follower import LogControlFollower
from omnidraft.fleet.control_log import FOR_ALL_PAIRS, publish_announcement
from omnidraft.ports import Announcement
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.snapshot_folders import manifest


class Fleet:
    """A control log, and the switch of a worker that serves one pair among several."""

    def __init__(self) -> None:
        self._log = MemoryLog(1)
        self.switch = self.new_switch()

    def new_switch(self) -> FactorSwitch:
        self._follower = LogControlFollower(
            MemoryReader(self._log, "control"),
            CountingMetrics(),
            kinds=FOR_ALL_PAIRS,
            target="t",
            drafter="d",
            must_be_named=True,
        )
        return FactorSwitch()

    def announce(self, kind, tenant, **fields) -> None:
        publish_announcement(MemoryWriter(self._log, "control"), kind, tenant=tenant, **fields)
        self.follow()

    def follow(self) -> None:
        for each in self._follower.poll(0):
            self.switch.on_announcement(each)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_an_operator_turns_one_tenants_factors_off_and_on_for_every_pair(fleet):
    made = manifest("s")
    fleet.announce("factors_off", "a")
    assert [fleet.switch.serves(tenant, made) for tenant in ("a", "b")] == [False, True]
    fleet.switch = fleet.new_switch()  # a worker that starts later
    fleet.follow()
    assert not fleet.switch.serves("a", made)
    fleet.announce("factors_on", "a")
    assert fleet.switch.serves("a", made)


def test_a_forgotten_tenants_factors_serve_again_only_in_snapshots_that_carried_out_every_order(fleet):
    fleet.announce("forget", "a", forget_id="one", until_ms=1)
    fleet.announce("forget", "a", forget_id="two", until_ms=2)
    before, half, after = (manifest("s", forgets=names) for names in ((), ("one",), ("one", "two")))
    assert [fleet.switch.serves("a", each) for each in (before, half, after)] == [False, False, True]
    assert fleet.switch.serves("b", before)


def test_every_loaded_snapshot_frees_what_was_forgotten():
    def loaded(version: int, **fields: object) -> LoadedSnapshot:
        factors = LoadedFactors({"a": lambda: None, "b": lambda: None})
        return LoadedSnapshot(version, "s", None, None, manifest("s", **fields), factors=factors)

    current, canary = loaded(2), loaded(3, forgets=("one",))
    slot = SnapshotSlot(previous := loaded(1))
    slot.swap(current)
    slot.set_canary(Canary(canary, 0.5))
    slot.on_announcement(Announcement(1, "forget", tenant="a", forget_id="one", until_ms=1))
    assert [each.factors.tenants for each in (previous, current, canary)] == [{"b"}, {"b"}, {"a", "b"}]


def test_an_order_about_factors_needs_a_tenant(fleet):
    with pytest.raises(ValueError, match="tenant"):
        fleet.announce("factors_off", None)
