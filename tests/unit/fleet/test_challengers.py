"""A version that its publisher could not name is judged all the same, and one that an operator left is not."""

from pathlib import Path

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.errors import RegistryError, SnapshotNotFound
from omnidraft.fleet import challengers, orders
from omnidraft.fleet.challengers import UNNAMED_S, Challengers
from omnidraft.fleet.control_log import LogAnnouncer
from omnidraft.fleet.controller import Controller
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryWriter
from tests.snapshot_folders import make_bundle


class Fleet:
    """A registry in folders whose champion is version 1, and controllers that start anew."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.registry = DirectoryRegistry(folder / "registry", "org/small", "big", keep_resume=2)
        self.writer = MemoryWriter(MemoryLog(), "control")
        self.publish("s1", None)
        self.registry.annotate(1, {"judgement": "promoted: the first snapshot of this pair"})
        self.registry.promote(1)

    def publish(self, snapshot_id: str, parent: int | None, before: float = 0.7, after: float = 0.8) -> None:
        figures = {"agreement_before": before, "agreement_after": after, "agreement_change_error": 0.001}
        parent_id = f"s{parent}" if parent else None
        folder = make_bundle(self.folder, snapshot_id, parent_id=parent_id, held_out_records=8, **figures)
        self.registry.publish(folder, parent)

    def publish_and_die(self, snapshot_id: str, parent: int | None, **figures: float) -> None:
        """The publisher is killed when the version is visible and has no alias yet."""
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr(self.registry, "_write_state", die)
            with pytest.raises(RegistryError, match="killed"):
                self.publish(snapshot_id, parent, **figures)

    def step(self) -> int:
        """Let a new controller step; return the champion."""
        announcer = LogAnnouncer(self.writer, "big", "org/small")
        Controller(self.registry, announcer, ControllerSettings(), CountingMetrics(), target="big").step()
        return self.registry.resolve("champion").version


def die(state: object) -> None:
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
    fleet.publish("s2", 1, after=0.6)
    assert fleet.step() == 1
    fleet.publish_and_die("s3", 2, before=0.6, after=0.9)
    search = Challengers(fleet.registry, lambda: fleet.now)
    for _ in range(2):
        found = search.find()
        assert found is not None
        assert found.version == 3
    fleet.registry.annotate(3, {"judgement": "refused: by somebody"})
    assert search.find() is None


def test_a_version_whose_publisher_may_still_name_it_is_left_to_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.publish_and_die("s2", 1)
    monkeypatch.setattr(challengers, "UNNAMED_S", 1e10)
    assert Challengers(fleet.registry, lambda: fleet.now).find() is None


def test_the_newest_version_is_looked_at_now_and_then(fleet: Fleet) -> None:
    search = Challengers(fleet.registry, lambda: fleet.now)
    assert search.find() is None
    fleet.publish_and_die("s2", 1)
    assert search.find() is None
    fleet.now = UNNAMED_S
    assert search.find() is not None


def test_a_version_that_an_operator_promoted_and_left_is_not_promoted_again(fleet: Fleet) -> None:
    """Its judgement says who promoted it, long after it is no longer `previous`."""
    fleet.publish("s2", 1)
    fleet.publish("s3", 2, before=0.8, after=0.9)
    for name in ("3", "2", "1"):
        orders.promote(fleet.registry, lambda: fleet.writer, name, target="big", drafter="org/small")
    assert fleet.registry.resolve("3").judgement == "promoted by an operator"
    assert fleet.registry.resolve("1").judgement == "promoted: the first snapshot of this pair"
    assert fleet.step() == 1
