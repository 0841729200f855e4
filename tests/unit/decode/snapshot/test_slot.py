"""One snapshot serves, the one before stays loaded, and a canary serves its share."""

from omnidraft.decode.snapshot.slot import Canary, LoadedSnapshot, SnapshotSlot
from tests.snapshot_folders import manifest


def loaded(version):
    return LoadedSnapshot(version, f"s{version}", object(), object(), manifest())


def test_a_swap_ends_the_canary_and_keeps_the_one_before():
    slot = SnapshotSlot(loaded(1))
    slot.set_canary(Canary(loaded(2), 0.1))
    slot.swap(loaded(3))
    assert (slot.current.version, slot.previous.version, slot.canary) == (3, 1, None)


def test_a_canary_serves_its_share_of_the_requests_and_the_same_ones_on_every_worker():
    slots = [SnapshotSlot(loaded(1)) for _ in range(2)]
    for slot in slots:
        slot.set_canary(Canary(loaded(2), 0.1))
    ids = [f"request-{number}" for number in range(4000)]
    first, second = ([slot.snapshot_for(name).version for name in ids] for slot in slots)
    assert first == second
    assert 320 < first.count(2) < 480  # 400 +- 4 standard deviations


def test_a_wider_canary_keeps_the_requests_it_had():
    ids = [f"request-{number}" for number in range(500)]
    narrow, wide = (Canary(loaded(2), share) for share in (0.1, 0.3))
    assert {name for name in ids if narrow.takes(name)} < {name for name in ids if wide.takes(name)}
