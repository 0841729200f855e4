"""One snapshot serves, the one before stays loaded, and a late loader cannot win."""

from dataclasses import replace

import pytest

from omnidraft.decode.slot import LoadedSnapshot, SnapshotSlot
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
