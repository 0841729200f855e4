"""A drift that was announced is announced over once, whichever controller sees its end."""

import random
from dataclasses import replace

import pytest

from omnidraft.errors import BusError, RegistryError
from omnidraft.fleet.drift import MOST_STREAMS, SETTLED_VALUES
from omnidraft.ports import Best, Drift
from omnidraft.testing.memory_log import MemoryWriter
from tests.unit.fleet.pair import Pair
from tests.unit.fleet.served import requests


class Served:
    """What was served since the last step."""

    is_at_end = True

    def __init__(self):
        self.waiting = []

    def new(self):
        waiting, self.waiting = self.waiting, []
        return waiting


class Traffic(Pair):
    """A pair whose controllers read what `serve` says."""

    def __init__(self, folder):
        super().__init__(folder)
        self.served, self.dice = Served(), random.Random(0)

    def start(self, **options):
        """A controller that begins with the control log as it is."""
        made = self.controller(traffic=self.served, **options)
        made.step()
        return made

    def drift(self, level, tenant="t"):
        """As another controller said before."""
        self.control().put(("drift", tenant, "text"), None if level is None else Drift(level=level))
        self.listener.poll(0)

    def best(self, version, *, promotion=None):
        control = self.control()
        promotion = promotion or control.read_whole().champion.promotion
        control.put(("best", "t"), Best(version=version, promotion=promotion), "0.6 on 16 records")

    def publish_all(self, number):
        """So many snapshots, the newest of which is the champion."""
        for version in range(1, number + 1):
            self.publish(f"s{version}", version - 1 or None)
            self.order(version)
            self.controller().step()

    def serve(self, controller, agreement, number, *, work="text", is_past=False, **told):
        self.served.waiting += [
            replace(each, work=work, is_past=is_past) for each in requests(self.dice, agreement, number, **told)
        ]
        controller.step()
        _, changes = self.listener.poll(0)
        return [(each.value is not None, *each.key[1:]) for each in changes if each.kind == "drift"]


BEGUN, OVER = (True, "t", "text"), (False, "t", "text")


@pytest.fixture
def pair(tmp_path):
    return Traffic(tmp_path)


def test_a_drift_goes_on_after_a_restart_and_its_recovery_is_announced(pair):
    before = pair.start()
    pair.serve(before, 0.75, 100)
    assert pair.serve(before, 0.5, 40) == [BEGUN]
    after = pair.start()
    assert pair.serve(after, 0.75, 20, is_past=True) == []  # read again, from before the fall
    assert pair.serve(after, 0.5, 60, is_past=True) == []
    assert pair.serve(after, 0.5, 60) == []
    assert pair.serve(after, 0.75, 20) == [OVER]
    assert pair.serve(after, 0.75, 200) == []
    assert pair.serve(pair.start(), 0.75, 200) == []


def test_a_resumed_drift_that_settles_low_is_announced_over(pair):
    pair.drift(0.75)
    after = pair.start()
    assert pair.serve(after, 0.5, SETTLED_VALUES - 1) == []
    assert pair.serve(after, 0.5, 1) == [OVER]


def test_a_fall_while_no_controller_ran_is_announced_with_the_first_request_after(pair):
    after = pair.start()
    assert pair.serve(after, 0.75, 100, is_past=True) == []
    assert pair.serve(after, 0.5, 40, is_past=True) == []
    assert pair.serve(after, 0.75, 5, tenant="another") == []
    assert pair.serve(after, 0.5, 1) == [BEGUN]
    assert pair.serve(after, 0.5, 20) == []
    assert pair.serve(after, 0.75, 20) == [OVER]
    assert pair.serve(after, 0.2, 40) == [BEGUN]


def test_a_snapshot_that_was_bad_from_its_first_requests_on_is_rolled_back_by_the_next_controller(pair):
    pair.publish_all(2)
    after = pair.start()
    pair.serve(after, 0.75, 100, is_past=True, version=1)
    pair.serve(after, 0.5, 30, is_past=True, version=2)
    assert pair.champion() == 2
    assert pair.serve(after, 0.5, 1, version=2) == [BEGUN]
    assert pair.champion() == 1


def test_a_fall_that_was_over_before_the_start_is_not_announced(pair):
    after = pair.start()
    for agreement, number in ((0.75, 100), (0.5, 40), (0.75, 40)):
        pair.serve(after, agreement, number, is_past=True)
    assert pair.serve(after, 0.75, 100) == []


def test_a_fall_before_the_start_is_forgotten_with_its_stream(pair):
    after = pair.start()
    pair.serve(after, 0.75, 100, is_past=True)
    pair.serve(after, 0.5, 40, is_past=True)
    of_others(pair, MOST_STREAMS)
    assert pair.serve(after, 0.7, 1, tenant="last") == []


def of_others(pair, number):
    """A request of each of so many other tenants waits."""
    for each in range(number):
        pair.served.waiting += requests(pair.dice, 0.7, 1, tenant=f"t{each}")


def test_a_drift_that_is_over_is_not_resumed(pair):
    pair.drift(0.75)
    pair.drift(None)
    after = pair.start()
    assert pair.serve(after, 0.5, SETTLED_VALUES + 20) == []
    assert pair.serve(after, 0.2, 40) == [BEGUN]


def test_the_drift_of_a_stream_that_is_evicted_is_announced_over(pair):
    pair.drift(0.75)
    after = pair.start()
    of_others(pair, MOST_STREAMS + 5)
    assert pair.serve(after, 0.7, 1, tenant="last") == [OVER]
    assert pair.metrics.value("omnidraft_drifts_over_total", target="big") == 1


def test_more_open_drifts_than_can_be_watched_end_oldest_first(pair):
    control = pair.control()
    for number in range(MOST_STREAMS + 2):
        control.put(("drift", f"t{number}", "text"), Drift(level=0.75))
    pair.listener.poll(0)
    told = pair.serve(pair.start(), 0.7, 1, tenant=f"t{MOST_STREAMS}")
    assert told == [(False, "t0", "text"), (False, "t1", "text")]


class Refusing(MemoryWriter):
    """A log that is down while `is_down`."""

    is_down = False

    def append(self, messages):
        if self.is_down:
            raise BusError("no broker")
        super().append(messages)


def test_what_a_failing_log_did_not_take_is_announced_by_the_next_step(pair):
    writer = Refusing(pair.log, "control")
    controller = pair.start(writer=writer)
    pair.serve(controller, 0.75, 100)
    writer.is_down = True
    with pytest.raises(BusError, match="no broker"):
        pair.serve(controller, 0.5, 40)
    with pytest.raises(BusError, match="no broker"):
        controller.step()
    assert pair.metrics.value("omnidraft_drift_alarms_total", target="big") == 0
    writer.is_down = False
    assert pair.serve(controller, 0.5, 1) == [BEGUN]
    assert pair.serve(controller, 0.5, 5) == []
    assert pair.metrics.value("omnidraft_drift_alarms_total", target="big") == 1


def fail(*args, **fields):
    raise RegistryError("no registry")


def best_of_a_drift(pair, version):
    """A controller with two snapshots and a drift, to which the distiller announced this version as the best."""
    pair.publish_all(2)
    controller = pair.start()
    pair.serve(controller, 0.75, 100)
    pair.serve(controller, 0.5, 40)
    pair.best(version)
    return controller


@pytest.mark.parametrize("failing", ["resolve", "versions", "annotate", "promote"])
@pytest.mark.parametrize("is_rollback", [False, True], ids=["best", "rollback"])
def test_another_snapshot_is_taken_once_the_registry_is_back(pair, monkeypatch, failing, is_rollback):
    if is_rollback:
        pair.publish_all(2)
        controller = pair.start()
        pair.serve(controller, 0.75, 100, version=1)
    else:
        controller = best_of_a_drift(pair, 1)
    with monkeypatch.context() as down:
        down.setattr(pair.registry, failing, fail)
        with pytest.raises(RegistryError, match="no registry"):
            pair.serve(controller, 0.5, 30, version=2)
    for _ in range(2):
        controller.step()
        assert (pair.champion(), pair.previous()) == (1, 2)
    assert pair.judgement(1).startswith("promoted: ")
    assert ("with the first requests of snapshot 2" in pair.judgement(1)) is is_rollback


def test_a_rollback_that_had_to_wait_overrules_no_operator(pair, monkeypatch):
    pair.publish_all(2)
    controller = pair.start()
    pair.serve(controller, 0.75, 100, version=1)
    with monkeypatch.context() as down:
        down.setattr(pair.registry, "annotate", fail)
        with pytest.raises(RegistryError, match="no registry"):
            pair.serve(controller, 0.5, 30, version=2)
    pair.publish("s3", 2)
    pair.order(3)
    for _ in range(2):
        controller.step()
        assert pair.champion() == 3


def test_a_best_snapshot_that_is_gone_holds_nothing_up(pair):
    controller = best_of_a_drift(pair, 9)
    assert pair.serve(controller, 0.75, 20) == [OVER]
    assert pair.champion() == 2


def test_a_champion_that_takes_no_note_holds_no_reaction_up(pair, monkeypatch):
    pair.publish_all(2)
    controller, annotate = pair.start(), pair.registry.annotate
    pair.serve(controller, 0.75, 100, version=1)
    monkeypatch.setattr(
        pair.registry, "annotate", lambda version, notes: (annotate if "judgement" in notes else fail)(version, notes)
    )
    assert pair.serve(controller, 0.5, 30, version=2) == [BEGUN]
    assert pair.champion() == 1
    assert pair.serve(controller, 0.75, 20, version=1) == [OVER]


def test_a_best_snapshot_that_was_announced_while_no_controller_ran_is_taken_unless_it_was(pair):
    pair.publish_all(2)
    pair.serve(pair.start(), 0.75, 100)
    pair.drift(0.7)
    pair.best(1)
    pair.start()
    assert pair.champion() == 1
    pair.order(2)
    for _ in range(2):
        pair.start()
    assert pair.champion() == 2
