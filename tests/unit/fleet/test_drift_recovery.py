"""A drift that was announced is announced over once, whichever controller sees its end."""

import random
from dataclasses import replace

import pytest
from omnidraft.fleet.control_follower import LogControlFollower

from omnidraft.errors import BusError, RegistryError
from omnidraft.fleet import control_log
from omnidraft.fleet.drift import MOST_STREAMS, SETTLED_VALUES, DriftDetector
from omnidraft.fleet.drift_recovery import FOLLOWED_KINDS, DriftRecovery
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.snapshot_folders import make_bundle
from tests.unit.fleet.served import requests


class Pair:
    """The control log of a pair, and one drift recovery after another."""

    def __init__(self, folder):
        self.registry = DirectoryRegistry(folder, "org/small", "big", keep_resume=2)
        self.log, self.metrics, self.dice = MemoryLog(), CountingMetrics(), random.Random(0)
        self.writer = MemoryWriter(self.log, "control")
        self.everything = self.follower()

    def follower(self):
        return LogControlFollower(MemoryReader(self.log, "control"), self.metrics, kinds=FOLLOWED_KINDS)

    def start(self):
        """A recovery that begins with the control log as it is."""
        announcer = control_log.LogAnnouncer(self.writer, "big", "org/small")
        recovery = DriftRecovery(self.registry, announcer, DriftDetector(), self.metrics, target="big")
        recovery.resume(self.follower().poll(0))
        return recovery

    def announce(self, kind, version=None, tenant="t", **fields):
        control_log.publish_announcement(self.writer, kind, version, tenant=tenant, **fields)
        return self.everything.poll(0)

    def publish(self, folder, number):
        """So many snapshots, the newest of which is the champion."""
        for version in range(1, number + 1):
            parent_id = f"s{version - 1}" if version > 1 else None
            self.registry.publish(make_bundle(folder, f"s{version}", parent_id=parent_id), version - 1 or None)
            self.registry.promote(version)

    def champion(self):
        return self.registry.resolve("champion").version

    def serve(self, recovery, agreement, number, *, work="text", is_past=False, **told):
        for request in requests(self.dice, agreement, number, **told):
            recovery.update(replace(request, work=work, is_past=is_past))
        recovery.react()
        return [(each.kind, each.tenant, each.work) for each in self.everything.poll(0)]


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def test_a_drift_goes_on_after_a_restart_and_its_recovery_is_announced(pair):
    before = pair.start()
    pair.serve(before, 0.75, 100)
    assert pair.serve(before, 0.5, 40) == [("drift", "t", "text")]
    after = pair.start()
    assert pair.serve(after, 0.75, 20, is_past=True) == []  # read again, from before the fall
    assert pair.serve(after, 0.5, 60, is_past=True) == []
    assert pair.serve(after, 0.5, 60) == []
    assert pair.serve(after, 0.75, 20) == [("drift_over", "t", "text")]
    assert pair.serve(after, 0.75, 200) == []
    assert pair.serve(pair.start(), 0.75, 200) == []


def test_a_resumed_drift_that_settles_low_is_announced_over(pair):
    pair.announce("drift", work="text", level=0.75)
    after = pair.start()
    assert pair.serve(after, 0.5, SETTLED_VALUES - 1) == []
    assert pair.serve(after, 0.5, 1) == [("drift_over", "t", "text")]


def test_a_fall_while_no_controller_ran_is_announced_with_the_first_request_after(pair):
    after = pair.start()
    assert pair.serve(after, 0.75, 100, is_past=True) == []
    assert pair.serve(after, 0.5, 40, is_past=True) == []
    assert pair.serve(after, 0.75, 5, tenant="another") == []
    assert pair.serve(after, 0.5, 1) == [("drift", "t", "text")]
    assert pair.serve(after, 0.5, 20) == []
    assert pair.serve(after, 0.75, 20) == [("drift_over", "t", "text")]
    assert pair.serve(after, 0.2, 40) == [("drift", "t", "text")]


def test_a_snapshot_that_was_bad_from_its_first_requests_on_is_rolled_back_by_the_next_controller(pair, tmp_path):
    pair.publish(tmp_path, 2)
    after = pair.start()
    pair.serve(after, 0.75, 100, is_past=True, version=1)
    pair.serve(after, 0.5, 30, is_past=True, version=2)
    assert pair.champion() == 2
    assert pair.serve(after, 0.5, 1, version=2) == [("drift", "t", "text")]
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
    for number in range(MOST_STREAMS):
        for request in requests(pair.dice, 0.7, 1, tenant=f"t{number}"):
            after.update(request)
    assert pair.everything.poll(0) == ()


def test_a_drift_that_is_over_is_not_resumed(pair):
    pair.announce("drift", work="text", level=0.75)
    pair.announce("drift_over", work="text", level=0.75)
    after = pair.start()
    assert pair.serve(after, 0.5, SETTLED_VALUES + 20) == []
    assert pair.serve(after, 0.2, 40) == [("drift", "t", "text")]


def test_the_drift_of_a_stream_that_is_evicted_is_announced_over(pair):
    pair.announce("drift", work="text", level=0.75)
    after = pair.start()
    told = [each for number in range(MOST_STREAMS + 5) for each in pair.serve(after, 0.7, 1, tenant=f"t{number}")]
    assert told == [("drift_over", "t", "text")]
    assert pair.metrics.value("omnidraft_drifts_over_total", target="big") == 1


def test_more_open_drifts_than_can_be_watched_end_oldest_first(pair):
    for number in range(MOST_STREAMS + 2):
        control_log.publish_announcement(pair.writer, "drift", tenant=f"t{number}", work="text", level=0.75)
    pair.everything.poll(0)
    told = pair.serve(pair.start(), 0.7, 1, tenant=f"t{MOST_STREAMS}")
    assert told == [("drift_over", "t0", "text"), ("drift_over", "t1", "text")]


def test_what_a_failing_log_did_not_take_is_announced_by_the_next_call(pair, monkeypatch):
    recovery = pair.start()
    pair.serve(recovery, 0.75, 100)

    def fail(*args, **fields):
        raise BusError("no broker")

    with monkeypatch.context() as down:
        down.setattr(control_log.LogAnnouncer, "publish", fail)
        with pytest.raises(BusError, match="no broker"):
            pair.serve(recovery, 0.5, 40)
        with pytest.raises(BusError, match="no broker"):
            recovery.announce()
    assert pair.metrics.value("omnidraft_drift_alarms_total", target="big") == 0
    assert pair.serve(recovery, 0.5, 1) == [("drift", "t", "text")]
    recovery.announce()
    assert pair.serve(recovery, 0.5, 5) == []
    assert pair.metrics.value("omnidraft_drift_alarms_total", target="big") == 1


def fail(*args, **fields):
    raise RegistryError("no registry")


def best_of_a_drift(pair, folder, version):
    """A recovery with two snapshots and a drift, to which the distiller announced this version as the best."""
    pair.publish(folder, 2)
    recovery = pair.start()
    pair.serve(recovery, 0.75, 100)
    pair.serve(recovery, 0.5, 40)
    for announcement in pair.announce("best", version, reason="0.6 on 16 records"):
        recovery.on_announcement(announcement)
    return recovery


@pytest.mark.parametrize("failing", ["fence", "resolve", "versions", "promote_unless_changed"])
def test_the_best_snapshot_is_taken_once_the_registry_is_back(pair, tmp_path, monkeypatch, failing):
    recovery = best_of_a_drift(pair, tmp_path, 1)
    with monkeypatch.context() as down:
        down.setattr(pair.registry, failing, fail)
        with pytest.raises(RegistryError, match="no registry"):
            recovery.react()
    recovery.react()
    assert pair.champion() == 1


@pytest.mark.parametrize("is_rollback", [False, True], ids=["best", "rollback"])
def test_a_promotion_whose_answer_was_lost_is_asked_for_again_with_its_fence(pair, tmp_path, monkeypatch, is_rollback):
    """Only so does MLflow give way to an operator who promoted meanwhile."""
    promote, fences = pair.registry.promote_unless_changed, []

    def lose_answer(version, fence):
        promote(version, fence)
        fences.append(fence)
        if len(fences) == 1:
            raise RegistryError("no answer")

    monkeypatch.setattr(pair.registry, "promote_unless_changed", lose_answer)
    if is_rollback:
        pair.publish(tmp_path, 2)
        recovery = pair.start()
        pair.serve(recovery, 0.75, 100, version=1)
        with pytest.raises(RegistryError, match="no answer"):
            pair.serve(recovery, 0.5, 30, version=2)
    else:
        recovery = best_of_a_drift(pair, tmp_path, 1)
        with pytest.raises(RegistryError, match="no answer"):
            recovery.react()
    for _ in range(2):
        recovery.react()
    assert (pair.champion(), fences) == (1, fences[:1] * 2)
    assert pair.registry.resolve("1").judgement.startswith("promoted again: ")


def test_a_best_snapshot_that_is_gone_holds_nothing_up(pair, tmp_path):
    recovery = best_of_a_drift(pair, tmp_path, 9)
    assert pair.serve(recovery, 0.75, 20) == [("drift_over", "t", "text")]
    assert pair.champion() == 2


@pytest.mark.parametrize("failing", ["annotate", "log_metrics"])
def test_a_champion_whose_run_is_deleted_holds_no_reaction_up(pair, tmp_path, monkeypatch, failing):
    pair.publish(tmp_path, 2)
    recovery = pair.start()
    pair.serve(recovery, 0.75, 100, version=1)
    monkeypatch.setattr(pair.registry, failing, fail)
    assert pair.serve(recovery, 0.5, 30, version=2) == [("drift", "t", "text")]
    assert pair.champion() == 1
    assert pair.serve(recovery, 0.75, 20, version=1) == [("drift_over", "t", "text")]


def test_a_best_snapshot_that_was_announced_while_no_controller_ran_is_taken_unless_it_was(pair, tmp_path):
    pair.publish(tmp_path, 2)
    pair.serve(pair.start(), 0.75, 100)
    pair.announce("drift", work="text", level=0.7)
    fence = pair.registry.fence()
    pair.announce("best", 1, reason="0.6 on 16 records", fence=fence)
    pair.start().react()
    assert pair.champion() == 1
    pair.registry.promote(2)  # an operator's
    pair.start().react()
    assert pair.champion() == 2
