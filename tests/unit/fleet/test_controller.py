"""A challenger becomes champion when it is shown not to be worse, and everybody hears of it."""

import json
import shutil
import threading
from functools import partial

import pytest
from omnidraft.fleet.control_follower import LogControlFollower

from omnidraft.config import ControllerSettings
from omnidraft.errors import BusError, RegistryError, SnapshotNotFound, SnapshotStale
from omnidraft.fleet import control_log
from omnidraft.fleet.controller import Controller
from omnidraft.fleet.drift import DriftDetector
from omnidraft.fleet.drift_recovery import FOLLOWED_KINDS, DriftRecovery
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.ports import Outgoing
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.registry.republish import republish
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.traces import codec
from tests.silent_reader import SilentReader
from tests.snapshot_folders import make_bundle, version_folder
from tests.trace_records import make_record
from tests.unit.fleet.served import serve


class Fleet:
    """A registry in folders, a control log, and one controller after another."""

    def __init__(self, folder):
        self.folder = folder
        self.registry = DirectoryRegistry(folder / "registry", "org/small", "big", keep_resume=2)
        self.log = MemoryLog()
        self.writer = MemoryWriter(self.log, "control")
        self.metrics = CountingMetrics()
        self.follower = LogControlFollower(MemoryReader(self.log, "control"), self.metrics, kinds=("champion",))

    def controller(self, writer=None):
        settings = ControllerSettings()
        announcer = control_log.LogAnnouncer(writer or self.writer, "big", "org/small")
        return Controller(self.registry, announcer, settings, self.metrics, target="big")

    def publish(self, snapshot_id, parent, before=None, after=None):
        parent_id = self.registry.resolve(str(parent)).manifest.snapshot_id if parent else None
        told = {"parent_id": parent_id, "agreement_before": before, "agreement_after": after, "held_out_records": 8}
        told["agreement_change_error"] = 0.001
        return self.registry.publish(make_bundle(self.folder, snapshot_id, **told), parent).version

    def champion(self):
        return self.registry.resolve("champion").version

    def heard(self):
        return next((told.version for told in self.follower.poll(0)), None)


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
    notes = (version_folder(fleet.folder / "registry", 3) / "notes.json").read_text()
    assert "refused: held-out agreement 0.6000" in notes


class DeadWriter:
    """A log that is down."""

    def append(self, messages):
        raise BusError("down")

    def close(self): ...


def controller_of_two_snapshots(fleet, controller=None):
    """Return the controller that promoted version 1, then judged the better version 2."""
    controller = controller or fleet.controller()
    fleet.publish("s1", None)
    controller.step()
    fleet.publish("s2", 1, 0.7, 0.8)
    controller.step()
    return controller


def test_a_controller_killed_between_promoting_and_announcing_is_made_good_by_the_next(fleet):
    fleet.publish("s1", None)
    with pytest.raises(BusError):
        fleet.controller(DeadWriter()).step()
    assert (fleet.champion(), fleet.heard()) == (1, None)
    fleet.controller().step()
    assert fleet.heard() == 1


def no_promotion(*args):
    raise RegistryError("down")


def test_a_controller_killed_between_a_judgement_and_the_promotion_is_made_good_by_the_next(fleet):
    fleet.publish("s1", None)
    fleet.registry.annotate(1, {"judgement": "promoting: the first snapshot of this pair"})
    fleet.controller().step()
    assert (fleet.champion(), fleet.heard()) == (1, 1)
    assert fleet.registry.resolve("1").judgement == "promoted: the first snapshot of this pair"


def test_a_controller_killed_right_after_the_promotion_has_it_noted_by_the_next(fleet):
    fleet.publish("s1", None)
    fleet.registry.annotate(1, {"judgement": "promoting: the first snapshot of this pair"})
    fleet.registry.promote_unless_changed(1, fleet.registry.fence())
    fleet.controller().step()
    assert (fleet.champion(), fleet.heard()) == (1, 1)
    assert fleet.registry.resolve("1").judgement == "promoted: the first snapshot of this pair"


def test_a_first_snapshot_that_was_not_promoted_after_all_leaves_that_to_the_next_one(fleet, monkeypatch):
    """The distiller publishes between a judgement and the next try."""
    fleet.publish("s1", None)
    with monkeypatch.context() as down:
        down.setattr(fleet.registry, "promote_unless_changed", no_promotion)
        with pytest.raises(RegistryError):
            fleet.controller().step()
    fleet.publish("s2", 1, 0.7, 0.8)
    fleet.controller().step()
    assert (fleet.champion(), fleet.heard()) == (2, 2)
    base, learned = (fleet.registry.resolve(version).judgement for version in ("1", "2"))
    assert base == "promoting: the first snapshot of this pair"
    assert learned.startswith("promoted: held-out agreement 0.8000")


@pytest.mark.parametrize("has_base", [True, False], ids=["published", "not published"])
@pytest.mark.parametrize(
    ("after", "error", "reason"),
    [
        (0.8, 0.001, "promoted: held-out agreement 0.8000"),
        (0.6, 0.001, "refused: held-out agreement 0.6000"),
        (0.7, 0.0, "no difference"),
        (None, None, "refused: no held-out records"),
    ],
)
def test_the_first_learned_snapshot_is_compared_with_the_base_drafter(fleet, has_base, after, error, reason):
    """The base drafter was never judged: it was published, or learned from, before any controller ran."""
    if has_base:
        fleet.registry.publish(make_bundle(fleet.folder, "base"), None)
    before = None if after is None else 0.7
    told = {"agreement_before": before, "agreement_after": after, "agreement_change_error": error}
    told |= {"train": "lora", "parent_id": "base" if has_base else None, "held_out_records": 8}
    version = fleet.registry.publish(make_bundle(fleet.folder, "s1", **told), 1 if has_base else None).version
    fleet.controller().step()
    assert reason in fleet.registry.resolve(str(version)).judgement
    assert fleet.heard() == (version if after == 0.8 else None)


def test_where_the_aliases_were_lost_no_challenger_is_promoted_before_an_operator_names_the_champion(fleet):
    controller = controller_of_two_snapshots(fleet)
    (version_folder(fleet.folder / "registry", 2).parent / "aliases.json").unlink()
    fleet.publish("s3", 2, 0.8, 0.6)
    controller.step()
    with pytest.raises(SnapshotNotFound):
        fleet.champion()
    judgement = fleet.registry.resolve("3").judgement
    assert judgement.startswith("refused: the registry names no champion, but version 2 was promoted before")
    assert "`omnidraft snapshots promote VERSION`" in judgement
    fleet.registry.promote(2)
    fleet.publish("s4", 3, 0.6, 0.9)
    controller.step()
    assert fleet.champion() == 4


def test_a_rollback_by_hand_is_announced_and_not_undone_by_a_restart(fleet):
    controller = controller_of_two_snapshots(fleet)
    assert fleet.heard() == 2
    fleet.registry.promote(1)
    controller.step()
    assert fleet.heard() == 1
    fleet.controller().step()
    assert (fleet.champion(), fleet.heard()) == (1, 1)
    assert fleet.metrics.value("omnidraft_rollbacks_total") == 1


def test_a_challenger_that_was_promoted_before_is_not_judged_after_a_rollback(fleet):
    """It is called `challenger` once more, as by a publisher that tried again in between."""
    controller_of_two_snapshots(fleet)
    fleet.registry.promote(1)
    aliases = version_folder(fleet.folder / "registry", 2).parent / "aliases.json"
    aliases.write_text(json.dumps(json.loads(aliases.read_text()) | {"challenger": 2}))
    fleet.controller().step()
    assert fleet.champion() == 1
    fleet.publish("s3", 2, 0.8, 0.9)
    fleet.controller().step()
    assert fleet.champion() == 3


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


class Canaries(Fleet):
    """A fleet that tries challengers out, and what is served in it."""

    def __init__(self, folder):
        super().__init__(folder)
        self.now = 0.0
        self.traces = MemoryWriter(self.log, "traces")
        kinds = ("champion", "canary", "drift", "drift_over")
        self.everything = LogControlFollower(MemoryReader(self.log, "control"), self.metrics, kinds=kinds)

    def controller(self, writer=None, reader=None):
        settings = ControllerSettings(canary_share=0.1, canary_requests=20, confidence=0.95)
        announcer = control_log.LogAnnouncer(writer or self.writer, "big", "org/small")
        pair = {"target": "big", "drafter": "org/small"}
        watch = DriftDetector()
        return Controller(
            self.registry,
            announcer,
            settings,
            self.metrics,
            target="big",
            traffic=RequestStatsReader(MemoryReader(self.log, "traces"), **pair),
            recovery=DriftRecovery(self.registry, announcer, watch, self.metrics, target="big"),
            follower=LogControlFollower(
                reader or MemoryReader(self.log, "control"), self.metrics, kinds=FOLLOWED_KINDS
            ),
            clock=lambda: self.now,
        )

    def told(self):
        return [(each.kind, each.version) for each in self.everything.poll(0)]

    def told_works(self):
        return [(each.kind, each.work) for each in self.everything.poll(0)]

    def judgement(self, version):
        return json.loads((version_folder(self.folder / "registry", version) / "notes.json").read_text())["judgement"]


@pytest.fixture
def canaries(tmp_path):
    return Canaries(tmp_path)


def two_snapshots(canaries):
    controller = controller_of_two_snapshots(canaries)
    assert (canaries.champion(), canaries.told()) == (1, [("canary", 2)])
    return controller


def test_a_canary_that_is_as_fast_becomes_champion(canaries):
    controller = two_snapshots(canaries)
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1)
    controller.step()
    assert (canaries.champion(), canaries.told()) == (2, [("champion", 2)])
    assert "promoted: canary" in canaries.judgement(2)


def test_a_slow_canary_is_thrown_back_with_the_reason_and_its_requests_go_back_to_the_champion(canaries):
    controller = two_snapshots(canaries)
    serve(canaries.traces, 1, 30, seconds=0.1)
    serve(canaries.traces, 2, 30, seconds=0.15)
    controller.step()
    assert (canaries.champion(), canaries.told()) == (1, [("champion", 1)])
    assert "refused: canary" in canaries.judgement(2)
    controller.step()
    assert canaries.told() == []


def test_while_a_canary_is_out_the_next_challenger_waits(canaries):
    controller = two_snapshots(canaries)
    canaries.publish("s3", 2, 0.8, 0.9)
    controller.step()
    assert canaries.told() == []
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1)
    controller.step()
    controller.step()
    assert canaries.champion() == 2
    assert canaries.told() == [("canary", 3)]


def test_requests_from_before_the_controllers_start_decide_no_canary(canaries):
    two_snapshots(canaries)
    serve(canaries.traces, 1, 30, seconds=0.1)
    serve(canaries.traces, 2, 30, seconds=0.3)
    after = canaries.controller()
    after.step()
    assert canaries.told() == [("canary", 2)]
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1, first=100)
    after.step()
    assert canaries.champion() == 2


def test_a_champion_moved_by_hand_ends_the_trial(canaries):
    controller = two_snapshots(canaries)
    canaries.registry.promote(2)
    controller.step()
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1)
    controller.step()
    assert (canaries.champion(), canaries.told()) == (2, [("champion", 2)])


def drift_of(canaries, controller, version, *, is_good, number=40, first=0, **fields):
    """Records whose first candidates are all right or all wrong."""
    for count in range(first, first + number):
        name = f"d{version}-{count}"
        pair = {"target": "big", "drafter": "org/small"}
        record = make_record(name, num_emitted=60, snapshot_version=version, **pair, **fields)
        record.rounds.accepted_M[::2] = is_good
        record.rounds.num_accepted_R[:] = is_good
        message = Outgoing(codec.key(record), codec.encode(record), codec.headers(record))
        canaries.traces.append([message])
    controller.step()


def champion_two(canaries):
    controller = two_snapshots(canaries)
    canaries.now = 1e6
    controller.step()
    assert canaries.champion() == 2
    canaries.told()
    return controller


def test_agreement_that_falls_with_the_traffic_is_told_and_noted_and_so_is_its_return(canaries):
    controller = champion_two(canaries)
    drift_of(canaries, controller, 2, is_good=1, number=80)
    drift_of(canaries, controller, 2, is_good=0, number=20, first=80)
    assert (canaries.told(), canaries.champion()) == ([("drift", None)], 2)
    notes = json.loads((version_folder(canaries.folder / "registry", 2) / "notes.json").read_text())
    assert "agreement of default fell: 1.000 before" in notes["drift"]
    drift_of(canaries, controller, 2, is_good=1, number=20, first=100)
    assert canaries.told() == [("drift_over", None)]
    assert canaries.metrics.value("omnidraft_drift_alarms_total", target="big") == 1


def test_a_snapshot_whose_first_requests_fall_is_rolled_back_at_once(canaries):
    controller = champion_two(canaries)
    drift_of(canaries, controller, 1, is_good=1, number=80)
    drift_of(canaries, controller, 2, is_good=0, number=20)
    assert canaries.champion() == 1
    assert ("champion", 1) in canaries.told()
    assert "with the first requests of snapshot 2" in canaries.judgement(1)


def test_a_change_of_traffic_during_a_canary_is_announced_and_the_champion_stays(canaries):
    controller = champion_two(canaries)
    canaries.publish("s3", 2, 0.9, 0.95)
    controller.step()
    assert canaries.told() == [("canary", 3)]
    for turn in range(15):
        for version, number in ((2, 6), (3, 1)):
            drift_of(canaries, controller, version, is_good=turn < 12, number=number, first=number * turn)
    assert (canaries.champion(), canaries.told()) == (2, [("drift", None)])


def test_a_canary_that_agrees_less_is_no_drift_of_the_champion(canaries):
    controller = champion_two(canaries)
    drift_of(canaries, controller, 2, is_good=1, number=40)
    canaries.publish("s3", 2, 0.9, 0.95)
    controller.step()
    assert canaries.told() == [("canary", 3)]
    for turn in range(15):
        drift_of(canaries, controller, 3, is_good=0, number=1, first=turn)
        drift_of(canaries, controller, 2, is_good=1, number=2, first=40 + 2 * turn)
    assert (canaries.champion(), canaries.told()) == (2, [])
    serve(canaries.traces, 3, 30, seconds=10.0)
    canaries.now += 1000
    controller.step()
    assert canaries.told() == [("champion", 2)]
    drift_of(canaries, controller, 3, is_good=0, number=40, first=15)  # it took them before it was refused
    assert (canaries.champion(), canaries.told()) == (2, [])
    canaries.registry.promote(3)
    controller.step()
    drift_of(canaries, controller, 3, is_good=0, number=40, first=55)
    assert ("drift", None) in canaries.told()


def test_a_refused_canary_of_an_earlier_controller_is_no_drift_of_the_champion_either(canaries):
    controller = champion_two(canaries)
    drift_of(canaries, controller, 2, is_good=1, number=40)
    canaries.publish("s3", 2, 0.9, 0.95)
    controller.step()
    drift_of(canaries, controller, 3, is_good=0, number=10)
    drift_of(canaries, controller, 2, is_good=1, number=20, first=40)
    serve(canaries.traces, 3, 30, seconds=10.0)
    canaries.now += 1000
    controller.step()
    assert "refused: canary" in canaries.judgement(3)
    drift_of(canaries, controller, 3, is_good=0, number=40, first=10)  # it took them before it was refused
    canaries.publish("s4", 3, 0.9, 0.5)
    controller.step()
    canaries.told()
    drift_of(canaries, canaries.controller(), 2, is_good=1, number=1, first=60)
    assert canaries.told() == [("champion", 2)]


def test_the_snapshot_that_agrees_best_with_the_drifted_traffic_is_taken_while_it_drifts_and_not_after(canaries):
    controller = champion_two(canaries)
    best = partial(
        control_log.publish_announcement, canaries.writer, "best", 1, tenant="default", reason="0.6 on 16 records"
    )
    best()
    controller.step()
    assert canaries.champion() == 2
    drift_of(canaries, controller, 2, is_good=1, number=80)
    drift_of(canaries, controller, 2, is_good=0, number=20, first=80)
    best()
    controller.step()
    assert canaries.champion() == 1
    assert "0.6 on 16 records" in canaries.judgement(1)


def test_a_controller_that_starts_while_the_control_log_is_silent_reads_no_traffic_before_it_knows_the_open_drifts(
    canaries,
):
    champion_two(canaries)
    control_log.publish_announcement(canaries.writer, "drift", tenant="default", work="text", level=1.0)
    after = canaries.controller(reader=SilentReader(canaries.log, "control", range(1)))
    with pytest.raises(BusError, match="gave nothing"):
        after.step()
    canaries.told()
    drift_of(canaries, after, 2, is_good=1, number=40)
    assert canaries.told() == [("drift_over", None)]


def test_a_tenant_whose_traffic_drifts_chooses_no_refused_snapshot_for_all(canaries):
    """It agrees best with his newest records, since it was learned from his poison."""
    controller = champion_two(canaries)
    canaries.publish("s3", 2, 0.8, 0.5)
    controller.step()
    assert "refused" in canaries.judgement(3)
    drift_of(canaries, controller, 2, is_good=1, number=80)
    drift_of(canaries, controller, 2, is_good=0, number=20, first=80)
    control_log.publish_announcement(canaries.writer, "best", 3, tenant="default", reason="0.9 on 16 records")
    controller.step()
    assert canaries.champion() == 2


class LosesAnswers(DirectoryRegistry):
    """Loses the answer to the first promotion, and hears of an operator's when it is asked once more, as MLflow may."""

    num_asked = 0

    def promote_unless_changed(self, version, fence):
        if version == 1:
            return super().promote_unless_changed(version, fence)
        self.num_asked += 1
        if self.num_asked > 1:
            super().promote(1)
            raise SnapshotStale("version 2 gives way to 1")
        super().promote_unless_changed(version, fence)
        raise RegistryError("no answer")


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_promotion_whose_answer_was_lost_is_settled_before_its_champion_is_announced(tmp_path, is_deleted):
    fleet = Fleet(tmp_path)
    fleet.registry = LosesAnswers(tmp_path / "registry", "org/small", "big", keep_resume=2)
    with pytest.raises(RegistryError, match="no answer"):
        controller_of_two_snapshots(fleet, controller := fleet.controller())
    assert (fleet.champion(), fleet.heard()) == (2, 1)
    if is_deleted:
        fleet.registry.promote(1)
        shutil.rmtree(version_folder(tmp_path / "registry", 2))
    for _ in range(2):
        controller.step()
    assert fleet.registry.num_asked == (1 if is_deleted else 2)
    assert (fleet.champion(), fleet.heard()) == (1, None)
    if not is_deleted:
        assert fleet.registry.resolve("2").judgement == "void: version 2 gives way to 1"


class Asleep(DirectoryRegistry):
    """Its controller writes down why it promotes, and falls asleep; meanwhile `happens`."""

    def happens(self) -> None: ...

    def annotate(self, version, notes):
        super().annotate(version, notes)
        happens, self.happens = self.happens, lambda: None
        happens()


@pytest.fixture
def drowsy(tmp_path):
    fleet = Fleet(tmp_path)
    fleet.registry = Asleep(tmp_path / "registry", "org/small", "big", keep_resume=2)
    fleet.publish("s1", None)
    controller = fleet.controller()
    controller.step()
    fleet.publish("s2", 1, 0.7, 0.8)
    fleet.registry.promote(2)
    controller.step()
    fleet.publish("s3", 2, 0.8, 0.9)
    return fleet, controller


@pytest.mark.parametrize("promoted", [[1], [3, 2], [2]], ids=["rolled back", "there and back", "shall stay"])
def test_an_operator_who_came_while_the_controller_slept_is_never_overruled(drowsy, promoted):
    fleet, controller = drowsy
    operator = DirectoryRegistry(fleet.folder / "registry", "org/small", "big", keep_resume=2)
    fleet.registry.happens = lambda: [operator.promote(version) for version in promoted]
    for _ in range(3):
        controller.step()
    assert fleet.champion() == promoted[-1]
    assert "void: " in (version_folder(fleet.folder / "registry", 3) / "notes.json").read_text()
    fleet.publish("s4", 3, 0.9, 0.95)
    controller.step()
    assert fleet.champion() == 4  # the next one is judged against what the operator chose


def test_a_void_challenger_whose_notes_are_damaged_since_is_not_judged_by_the_next_controller(drowsy):
    fleet, controller = drowsy
    fleet.registry.happens = lambda: fleet.registry.promote(1)
    controller.step()
    notes = version_folder(fleet.folder / "registry", 3) / "notes.json"
    assert "void: " in notes.read_text()
    notes.write_text("{")
    fleet.controller().step()
    assert fleet.champion() == 1


def test_an_operator_who_came_during_a_canary_is_never_overruled(canaries):
    controller = champion_two(canaries)
    canaries.publish("s3", 2, 0.9, 0.95)
    controller.step()
    assert ("canary", 3) in canaries.told()
    canaries.registry.promote(2)
    serve(canaries.traces, 3, 60, seconds=0.01)
    serve(canaries.traces, 2, 60, seconds=0.02, first=100)
    for _ in range(3):
        controller.step()
    assert canaries.champion() == 2


def test_a_canary_during_which_an_operator_chose_another_champion_is_not_tried_again_after_a_restart(canaries):
    controller = champion_two(canaries)
    canaries.publish("s3", 2, 0.9, 0.95)
    controller.step()
    canaries.registry.promote(1)
    controller.step()
    assert canaries.judgement(3).startswith("void: version 1 became champion")
    after = canaries.controller()
    after.step()
    for version in (1, 3):
        serve(canaries.traces, version, 30, seconds=0.1)
    after.step()
    assert canaries.champion() == 1


def test_a_comparison_from_before_an_operators_promotion_is_void(canaries):
    controller = champion_two(canaries)
    drift_of(canaries, controller, 2, is_good=1, number=80)
    fence = canaries.registry.fence()
    drift_of(canaries, controller, 2, is_good=0, number=40)
    canaries.registry.promote(2)
    control_log.publish_announcement(canaries.writer, "best", 1, tenant="default", reason="0.6", fence=fence)
    controller.step()
    assert canaries.champion() == 2


def rewinds(fleet):
    """The orders so far; of several the follower tells the newest."""
    follower = LogControlFollower(MemoryReader(fleet.log, "control"), fleet.metrics, kinds=("rewind",))
    return [(each.version, each.restart_id) for each in follower.poll(0)]


def judge_all(fleet, controller, *afters, first=2):
    """Challengers in a row, each the child of the one before, which agreed 0.7 at first."""
    for number, after in enumerate(afters, first):
        fleet.publish(f"s{number}", number - 1, 0.7, after)
        controller.step()


@pytest.mark.parametrize(
    ("afters", "ordered"),
    [
        ([0.69] * 6, [(1, "s7")]),
        ([0.69] * 5, []),
        ([0.69] * 5 + [None] + [0.69] * 5, []),
        ([0.69] * 13, [(1, "s13")]),
    ],
    ids=["six worse in a row", "five", "interrupted by one that was not measured", "twice"],
)
def test_learning_is_ordered_back_after_so_many_challengers_in_a_row_that_were_worse(fleet, afters, ordered):
    controller = fleet.controller()
    fleet.publish("s1", None)
    controller.step()
    judge_all(fleet, controller, *afters)
    assert fleet.champion() == 1
    assert rewinds(fleet) == ordered


def test_a_promotion_starts_the_count_anew(fleet):
    controller = fleet.controller()
    fleet.publish("s1", None)
    controller.step()
    judge_all(fleet, controller, *[0.69] * 5, 1.0)
    assert fleet.champion() == 7
    judge_all(fleet, controller, *[0.69] * 5, first=8)
    assert rewinds(fleet) == []
    judge_all(fleet, controller, 0.69, first=13)
    assert rewinds(fleet) == [(7, "s13")]


def test_a_snapshot_that_an_operator_published_again_is_left_only_after_as_many_that_were_worse_since(fleet):
    controller = fleet.controller()
    fleet.publish("s1", None)
    controller.step()
    judge_all(fleet, controller, *[0.69] * 5)
    republish(fleet.registry, "6")
    controller.step()
    assert "refused" in fleet.registry.resolve("7").judgement
    judge_all(fleet, controller, *[0.69] * 5, first=8)
    assert rewinds(fleet) == []
    judge_all(fleet, controller, 0.69, first=13)
    assert rewinds(fleet) == [(1, "s13")]


def test_canaries_that_no_worker_serves_do_not_become_champion_and_order_no_rewind(canaries):
    controller = two_snapshots(canaries)
    for version in range(2, 8):
        serve(canaries.traces, 1, 100, seconds=0.1, first=100 * version)
        canaries.now += 700
        controller.step()
        assert "workers do not serve it" in canaries.judgement(version)
        canaries.publish(f"s{version + 1}", version, 0.7, 0.8)
        controller.step()
    assert canaries.champion() == 1
    assert rewinds(canaries) == []


def no_curves(*args):
    raise RegistryError("the run is deleted")


def test_a_challenger_without_curves_is_judged_and_counted_once(fleet, monkeypatch):
    monkeypatch.setattr(fleet.registry, "log_metrics", no_curves)
    controller = fleet.controller()
    fleet.publish("s1", None)
    controller.step()
    judge_all(fleet, controller, 0.69)
    for _ in range(8):
        controller.step()
    assert rewinds(fleet) == []
    assert fleet.metrics.value("omnidraft_refusals_total") == 1


class WithoutRewinds(MemoryWriter):
    """A log that refuses the first orders to rewind."""

    num_left = 3

    def append(self, messages):
        if b'"rewind"' in messages[0].value and self.num_left:
            self.num_left -= 1
            raise BusError("down")
        super().append(messages)


def test_a_challenger_that_is_judged_again_while_the_log_is_down_counts_once(fleet):
    controller = fleet.controller(WithoutRewinds(fleet.log, "control"))
    fleet.publish("s1", None)
    controller.step()
    judge_all(fleet, controller, *[0.69] * 5)
    fleet.publish("s7", 6, 0.7, 0.69)
    for _ in range(WithoutRewinds.num_left):
        with pytest.raises(BusError):
            controller.step()
    controller.step()
    follower = LogControlFollower(MemoryReader(fleet.log, "control"), fleet.metrics, kinds=("rewind",))
    (order,) = follower.poll(0)
    assert (order.restart_id, order.reason) == ("s7", "6 challengers in a row were worse than champion 1")
    judge_all(fleet, controller, *[0.69] * 5, first=8)
    assert rewinds(fleet) == [(1, "s7")]


def test_a_challenger_that_an_operator_decided_on_is_not_tried_again_after_a_restart(drowsy):
    fleet, controller = drowsy
    operator = DirectoryRegistry(fleet.folder / "registry", "org/small", "big", keep_resume=2)
    fleet.registry.happens = lambda: [operator.promote(1)]
    controller.step()
    assert fleet.registry.resolve("challenger").version == 3
    fleet.controller().step()
    assert fleet.champion() == 1
    fleet.publish("s4", 3, 0.9, 0.95)
    fleet.controller().step()
    assert fleet.champion() == 4


def test_a_canary_whose_version_is_deleted_ends_and_the_next_challenger_is_judged(canaries):
    controller = two_snapshots(canaries)
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1)
    canaries.publish("s3", 2, 0.8, 0.9)
    shutil.rmtree(version_folder(canaries.folder / "registry", 2))
    controller.step()
    assert canaries.told() == [("champion", 1)]
    controller.step()
    assert canaries.judgement(3)
