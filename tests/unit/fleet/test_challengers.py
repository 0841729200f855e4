"""A version that its publisher could not name is judged all the same, and one that an operator left is not."""

import time
from pathlib import Path

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.errors import RegistryError, SnapshotNotFound
from omnidraft.fleet import challengers
from omnidraft.fleet.challengers import Challengers
from tests.unit.fleet.pair import Pair
from tests.unit.fleet.served import serve

HOUR_MS = 3_600_000
"""The age of every version."""


class Fleet(Pair):
    """A pair whose champion is version 1, and controllers that start anew."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.publish("s1", None)
        assert self.step() == 1

    def publish(self, snapshot_id: str, parent: int | None, before: float = 0.7, after: float = 0.8, **fields) -> int:
        created_ms = time.time_ns() // 1_000_000 - HOUR_MS
        return super().publish(snapshot_id, parent, before, after, created_ms=created_ms, **fields)

    def publish_and_die(self, snapshot_id: str, parent: int | None, **figures: float) -> None:
        """The publisher is killed when the version is visible and has no alias yet."""
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr("omnidraft.registry.directory_registry.DirectoryRegistry._write_aliases", die)
            with pytest.raises(RegistryError, match="killed"):
                self.publish(snapshot_id, parent, **figures)

    def step(self) -> int | None:
        """Let a new controller step; return the champion."""
        self.controller().step()
        return self.champion()

    def find(self) -> int | None:
        found = Challengers(self.registry, lambda: self.now).find()
        return found and found.version


def die(*arguments: object) -> None:
    raise RegistryError("killed")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_a_version_whose_publisher_was_killed_before_it_named_it_is_judged(fleet: Fleet) -> None:
    fleet.publish_and_die("s2", 1)
    with pytest.raises(SnapshotNotFound):
        fleet.registry.resolve("challenger")
    assert fleet.step() == 2


def test_a_challenger_that_was_judged_hides_none_and_is_not_judged_again_after_it(fleet: Fleet) -> None:
    """It would look better than the champion by the records of another time."""
    fleet.publish("s2", 1, before=0.95, after=0.9)
    assert fleet.step() == 1
    fleet.publish_and_die("s3", 2, before=0.7, after=0.85)
    assert fleet.find() == 3
    assert fleet.step() == 3
    assert fleet.find() is None
    assert fleet.step() == 3


def test_the_canary_of_a_version_without_a_name_begins_anew_when_the_controller_restarts(fleet: Fleet) -> None:
    fleet.settings = ControllerSettings(canary_share=0.1, canary_requests=20)
    fleet.publish_and_die("s2", 1)
    assert fleet.step() == 1
    assert fleet.judgement(2).startswith("on trial: ")
    after = fleet.controller()
    after.step()
    for version in (1, 2):
        serve(fleet.traces, version, 30, seconds=0.1)
    after.step()
    assert fleet.champion() == 2


def test_a_version_whose_publisher_may_still_name_it_is_left_to_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.publish_and_die("s2", 1)
    monkeypatch.setattr(challengers, "UNNAMED_S", 1e10)
    assert fleet.find() is None


def test_a_version_without_a_name_is_left_when_it_is_too_old(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.publish_and_die("s2", 1)
    monkeypatch.setattr(challengers, "ABANDONED_S", HOUR_MS / 1000)
    assert fleet.find() is None


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_a_version_that_an_operator_promoted_and_left_is_not_promoted_again(fleet: Fleet, is_by_hand: bool) -> None:
    """Its judgement says who promoted it, long after it is no longer `previous`."""
    fleet.publish("s2", 1)
    fleet.publish("s3", 2, before=0.8, after=0.9)
    for version in (3, 2, 1):
        if is_by_hand:
            fleet.move_alias(champion=version)
        else:
            fleet.order(version)
        assert fleet.step() == version
    assert fleet.judgement(3).startswith("promoted by an operator")
    assert fleet.step() == 1


def test_one_that_catches_up_after_a_tenant_was_forgotten_is_not_judged(fleet: Fleet) -> None:
    fleet.publish("s2", 1, catching_up_to={0: 9})
    assert (fleet.find(), fleet.step()) == (None, 1)
    fleet.publish_and_die("s3", 2, catching_up_to={0: 9})
    assert (fleet.find(), fleet.step()) == (None, 1)
    assert all(fleet.registry.resolve(version).judgement is None for version in ("2", "3"))
    fleet.publish("s4", 3)
    assert fleet.step() == 4
