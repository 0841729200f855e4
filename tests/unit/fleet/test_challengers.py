"""A version that its publisher could not name is judged all the same, and one that an operator left is not."""

import time
from pathlib import Path

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.errors import RegistryError, SnapshotNotFound
from omnidraft.fleet import challengers, orders
from omnidraft.fleet.challengers import Challengers, is_undecided
from omnidraft.fleet.control_log import LogAnnouncer
from omnidraft.fleet.controller import Controller
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.snapshot_folders import make_bundle
from tests.unit.fleet.served import serve

HOUR_MS = 3_600_000
"""The age of every version."""


class Fleet:
    """A registry in folders whose champion is version 1, and controllers that start anew."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.registry = DirectoryRegistry(folder / "registry", "org/small", "big", keep_resume=2)
        self.log, self.settings = MemoryLog(), ControllerSettings()
        self.writer, self.traces = MemoryWriter(self.log, "control"), MemoryWriter(self.log, "traces")
        self.publish("s1", None)
        self.registry.annotate(1, {"judgement": "promoted: the first snapshot of this pair"})
        self.registry.promote(1)

    def publish(self, snapshot_id: str, parent: int | None, before: float = 0.7, after: float = 0.8) -> None:
        figures = {"agreement_before": before, "agreement_after": after, "agreement_change_error": 0.001}
        parent_id, created_ms = f"s{parent}" if parent else None, time.time_ns() // 1_000_000 - HOUR_MS
        told = {"parent_id": parent_id, "held_out_records": 8, "created_ms": created_ms}
        folder = make_bundle(self.folder, snapshot_id, **told, **figures)
        self.registry.publish(folder, parent)

    def publish_and_die(self, snapshot_id: str, parent: int | None, **figures: float) -> None:
        """The publisher is killed when the version is visible and has no alias yet."""
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr(self.registry, "_write_state", die)
            with pytest.raises(RegistryError, match="killed"):
                self.publish(snapshot_id, parent, **figures)

    def controller(self) -> Controller:
        announcer = LogAnnouncer(self.writer, "big", "org/small")
        traffic = RequestStatsReader(MemoryReader(self.log, "traces"), target="big", drafter="org/small")
        return Controller(self.registry, announcer, self.settings, CountingMetrics(), target="big", traffic=traffic)

    def step(self) -> int:
        """Let a new controller step; return the champion."""
        self.controller().step()
        return self.registry.resolve("champion").version


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


def test_a_refused_version_is_not_judged_after_a_newer_one_when_the_controller_restarts(fleet: Fleet) -> None:
    """It is still called `challenger`, and would look better than the champion by the records of another time."""
    fleet.publish("s2", 1, before=0.95, after=0.9)
    assert fleet.step() == 1
    fleet.publish_and_die("s3", 2, before=0.7, after=0.85)
    assert fleet.step() == 3
    assert Challengers(fleet.registry, lambda: fleet.now).find() is None
    assert fleet.step() == 3


def test_the_canary_of_a_version_without_a_name_begins_anew_when_the_controller_restarts(fleet: Fleet) -> None:
    fleet.settings = ControllerSettings(canary_share=0.1, canary_requests=20)
    fleet.publish_and_die("s2", 1)
    assert fleet.step() == 1
    assert (fleet.registry.resolve("2").judgement or "").startswith("canary at")
    after = fleet.controller()
    after.step()
    for version in (1, 2):
        serve(fleet.traces, version, 30, seconds=0.1)
    after.step()
    assert fleet.registry.resolve("champion").version == 2


def test_a_version_whose_publisher_may_still_name_it_is_left_to_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.publish_and_die("s2", 1)
    monkeypatch.setattr(challengers, "UNNAMED_S", 1e10)
    assert Challengers(fleet.registry, lambda: fleet.now).find() is None


def test_a_version_without_a_name_is_left_when_it_is_too_old(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.publish_and_die("s2", 1)
    monkeypatch.setattr(challengers, "ABANDONED_S", HOUR_MS / 1000)
    assert Challengers(fleet.registry, lambda: fleet.now).find() is None


def test_a_version_that_an_operator_promoted_and_left_is_not_promoted_again(fleet: Fleet) -> None:
    """Its judgement says who promoted it, long after it is no longer `previous`."""
    fleet.publish("s2", 1)
    fleet.publish("s3", 2, before=0.8, after=0.9)
    for name in ("3", "2", "1"):
        orders.promote(fleet.registry, lambda: fleet.writer, name, target="big", drafter="org/small")
    assert fleet.registry.resolve("3").judgement == "promoted by an operator"
    assert fleet.registry.resolve("1").judgement == "promoted: the first snapshot of this pair"
    assert fleet.step() == 1


@pytest.mark.parametrize("judgement", [None, "canary at 10.0%: better"])
def test_a_champion_whose_judgement_does_not_say_so_is_noted_and_not_promoted_again_once_it_is_left(
    fleet: Fleet, judgement: str | None
) -> None:
    fleet.publish("s2", 1)
    fleet.publish("s3", 2, before=0.8, after=0.9)
    if judgement is not None:
        fleet.registry.annotate(3, {"judgement": judgement})
    fleet.registry.promote(3)
    assert fleet.step() == 3
    assert fleet.registry.resolve("3").judgement == "promoted by an operator"
    for version in (2, 1):
        fleet.registry.promote(version)
    assert fleet.step() == 1


@pytest.mark.parametrize("judgement", [None, "canary at 10.0%: better"])
def test_what_an_operator_could_not_promote_still_waits(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, judgement: str | None
) -> None:
    fleet.publish("s2", 1, before=0.8, after=0.9)
    if judgement is not None:
        fleet.registry.annotate(2, {"judgement": judgement})
    with monkeypatch.context() as refusing:
        refusing.setattr(fleet.registry, "promote", die)
        with pytest.raises(RegistryError, match="killed"):
            orders.promote(fleet.registry, lambda: fleet.writer, "2", target="big", drafter="org/small")
    assert is_undecided(fleet.registry.resolve("2").judgement)
    orders.promote(fleet.registry, lambda: fleet.writer, "2", target="big", drafter="org/small")
    assert fleet.registry.resolve("2").judgement == "promoted by an operator"


def test_an_order_that_cannot_be_noted_promotes_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.publish("s2", 1)
    monkeypatch.setattr(fleet.registry, "annotate", die)
    with pytest.raises(RegistryError, match="killed"):
        orders.promote(fleet.registry, lambda: fleet.writer, "2", target="big", drafter="org/small")
    assert fleet.registry.resolve("champion").version == 1
