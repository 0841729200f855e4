"""A challenger becomes champion when it is shown not to be worse, and everybody hears of it."""

import threading

import pytest

from omnidraft.bus.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.config import ControllerSettings
from omnidraft.errors import BusError
from omnidraft.fleet.announcements import ControlFollower
from omnidraft.fleet.promotion import Controller, decide
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.telemetry.metrics import CountingMetrics
from tests.snapshot_folders import make_bundle, manifest


def measured(snapshot_id, parent_id, before, after):
    told = {"agreement_before": before, "agreement_after": after, "held_out_records": 8}
    return manifest(snapshot_id, parent_id=parent_id, **told)


BASE = manifest("base")
EXACT = ControllerSettings()


def test_the_first_snapshot_of_a_pair_is_promoted():
    assert decide(BASE, None, EXACT).promote


@pytest.mark.parametrize(
    ("after", "tolerance", "promote"), [(0.71, 0, True), (0.70, 0, True), (0.69, 0, False), (0.69, 0.01, True)]
)
def test_a_child_must_not_fall_by_more_than_the_tolerance(after, tolerance, promote):
    assert decide(measured("s1", "base", 0.70, after), BASE, ControllerSettings(tolerance=tolerance)).promote is promote


def test_a_challenger_that_was_not_measured_is_refused_and_says_why():
    decision = decide(manifest("s1", parent_id="base"), BASE, ControllerSettings(tolerance=0.5))
    assert not decision.promote
    assert "no held-out records" in decision.reason


def test_better_than_a_refused_parent_is_not_enough():
    refused = measured("s1", "base", 0.80, 0.70)
    assert not decide(measured("s2", "s1", 0.70, 0.75), BASE, EXACT, between=[refused]).promote
    assert decide(measured("s2", "s1", 0.70, 0.81), BASE, EXACT, between=[refused]).promote


def unsure(snapshot_id, parent_id, before, after, error):
    return measured(snapshot_id, parent_id, before, after).model_copy(update={"agreement_change_error": error})


@pytest.mark.parametrize(("error", "promote"), [(0.01, True), (0.0242, True), (0.0244, False), (None, False)])
def test_where_confidence_is_asked_for_the_gain_must_exceed_its_error(error, promote):
    """1.645 standard errors at 95 %."""
    decision = decide(unsure("s1", "base", 0.70, 0.74, error), BASE, ControllerSettings(confidence=0.95))
    assert decision.promote is promote
    assert decide(unsure("s1", "base", 0.70, 0.74, error), BASE, EXACT).promote
    assert ("too few" in decision.reason) == (error is None)
    assert error is None or f"+- {1.96 * error:.4f}" in decision.reason


def test_gains_of_several_snapshots_in_a_row_make_sure_together():
    careful = ControllerSettings(confidence=0.95)
    first, second = unsure("s1", "base", 0.70, 0.72, 0.015), unsure("s2", "s1", 0.72, 0.74, 0.015)
    assert not decide(first, BASE, careful).promote
    assert decide(second, BASE, careful, between=[first]).promote


def test_a_stranger_is_compared_with_the_champion_itself():
    champion = measured("s5", "s4", 0.79, 0.80)
    assert not decide(measured("x", None, 0.60, 0.70), champion, EXACT).promote
    assert decide(measured("x", None, 0.60, 0.81), champion, EXACT).promote
    assert not decide(measured("x", None, 0.60, 0.81), manifest("s5", train="full"), EXACT).promote


def test_what_was_learned_offline_is_judged_against_the_base_drafter_it_began_with():
    assert decide(measured("x", None, 0.60, 0.81), BASE, EXACT).promote
    assert not decide(measured("x", None, 0.60, 0.59), BASE, EXACT).promote
    assert not decide(measured("x", None, 0.60, 0.81), manifest("base", drafter_hash="other"), EXACT).promote


class Fleet:
    """A registry in folders, a control log, and one controller after another."""

    def __init__(self, folder):
        self.folder = folder
        self.registry = DirectoryRegistry(folder / "registry", "org/small", "big", keep_resume=2)
        self.log = MemoryLog()
        self.writer = MemoryWriter(self.log, "control")
        self.metrics = CountingMetrics()
        self.follower = ControlFollower(MemoryReader(self.log, "control"), self.metrics)

    def controller(self, writer=None):
        settings = ControllerSettings(poll_s=0.001)
        writer = writer or self.writer
        return Controller(self.registry, writer, settings, self.metrics, target="big", drafter="org/small")

    def publish(self, snapshot_id, parent, before=None, after=None):
        parent_id = self.registry.resolve(str(parent)).manifest.snapshot_id if parent else None
        told = {"parent_id": parent_id, "agreement_before": before, "agreement_after": after, "held_out_records": 8}
        return self.registry.publish(make_bundle(self.folder, snapshot_id, **told), parent).version

    def champion(self):
        return self.registry.resolve("champion").version

    def heard(self):
        told = self.follower.poll(0)
        return told and told.version


@pytest.fixture
def fleet(tmp_path):
    return Fleet(tmp_path)


def test_challengers_are_judged_one_after_the_other_and_announced_once(fleet):
    controller = fleet.controller()
    controller.step()
    assert fleet.heard() is None
    for snapshot_id, parent, figures, champion in [
        ("s1", None, (None, None), 1),
        ("s2", 1, (0.7, 0.8), 2),
        ("s3", 2, (0.8, 0.6), 2),
        ("s4", 3, (0.6, 0.7), 2),
        ("s5", 4, (0.7, 0.9), 5),
    ]:
        fleet.publish(snapshot_id, parent, *figures)
        before = fleet.metrics.value("omnidraft_promotions_total")
        controller.step()
        controller.step()
        assert fleet.champion() == champion
        promoted = fleet.metrics.value("omnidraft_promotions_total") > before
        assert fleet.heard() == (champion if promoted else None)
    assert fleet.metrics.value("omnidraft_refusals_total") == 2
    notes = (fleet.registry._folder(3) / "notes.json").read_text()
    assert "refused: held-out agreement 0.6000" in notes


class DeadWriter:
    """A log that is down."""

    def append(self, messages):
        raise BusError("down")

    def close(self): ...


def test_a_controller_killed_between_promoting_and_announcing_is_made_good_by_the_next(fleet):
    fleet.publish("s1", None)
    with pytest.raises(BusError):
        fleet.controller(DeadWriter()).step()
    assert (fleet.champion(), fleet.heard()) == (1, None)
    fleet.controller().step()
    assert fleet.heard() == 1


def test_a_rollback_by_hand_is_announced_and_not_undone_by_a_restart(fleet):
    controller = fleet.controller()
    fleet.publish("s1", None)
    controller.step()
    fleet.publish("s2", 1, 0.7, 0.8)
    controller.step()
    assert fleet.heard() == 2
    fleet.registry.promote(1)
    controller.step()
    assert fleet.heard() == 1
    fleet.controller().step()
    assert (fleet.champion(), fleet.heard()) == (1, 1)
    assert fleet.metrics.value("omnidraft_rollbacks_total") == 1


def test_a_log_that_is_down_does_not_end_the_controller(fleet):
    fleet.publish("s1", None)
    stop = threading.Event()
    thread = threading.Thread(target=fleet.controller(DeadWriter()).run, args=(stop,))
    thread.start()
    while fleet.metrics.value("omnidraft_controller_errors_total") < 2:
        assert thread.is_alive()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
