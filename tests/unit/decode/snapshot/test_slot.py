"""One snapshot serves, the one before stays loaded, and a late loader cannot win."""

from dataclasses import replace

import pytest

from omnidraft.decode.snapshot.slot import Canary, LoadedSnapshot, SnapshotSlot
from omnidraft.errors import SnapshotStale
from tests.snapshot_folders import manifest


def loaded(version, sequence=0):
    return LoadedSnapshot(version, f"s{version}", object(), object(), manifest(), sequence)


def test_a_swap_keeps_the_one_before_for_a_rollback():
    slot = SnapshotSlot(loaded(1))
    slot.swap(loaded(2, sequence=3))
    assert (slot.current.version, slot.previous.version) == (2, 1)
    slot.swap(replace(slot.previous, sequence=4))
    assert (slot.current.version, slot.previous.version) == (1, 2)


def test_an_older_announcement_is_refused_and_changes_nothing():
    slot = SnapshotSlot(loaded(1))
    slot.swap(loaded(3, sequence=7))
    with pytest.raises(SnapshotStale, match="have announcement 7, was offered 6"):
        slot.swap(loaded(2, sequence=6))
    assert (slot.current.version, slot.previous.version) == (3, 1)


def test_the_same_version_again_only_takes_the_later_sequence():
    slot = SnapshotSlot(loaded(1))
    slot.swap(loaded(2, sequence=3))
    slot.swap(replace(slot.current, sequence=5))
    assert (slot.current.sequence, slot.current.version, slot.previous.version) == (5, 2, 1)


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


def test_another_champion_ends_the_canary_and_the_same_one_does_not():
    slot = SnapshotSlot(loaded(1))
    slot.set_canary(Canary(loaded(2), 0.1))
    slot.swap(loaded(1, sequence=1))
    assert [each.version for each in slot.loaded] == [1, 2]
    slot.swap(loaded(3, sequence=2))
    assert (slot.canary, [each.version for each in slot.loaded]) == (None, [3, 1])
