"""A challenger becomes champion when it is shown not to be worse; an operator's order comes before it."""

import shutil
import threading
import time

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.errors import BusError, LeaseLost, RegistryError
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.ports import Best, Drift, Outgoing, Rewind
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.testing.memory_log import MemoryReader, MemoryWriter
from omnidraft.traces import codec
from tests.http_server import threads_until_over
from tests.signed_fleet import new_signing
from tests.silent_reader import SilentReader
from tests.snapshot_folders import make_bundle
from tests.tiny_engine import PATIENCE_S, wait_until
from tests.trace_records import make_record
from tests.unit.fleet.pair import Pair
from tests.unit.fleet.served import serve


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def of_two_snapshots(pair, **readers):
    """Return the controller that promoted version 1, then judged the better version 2."""
    controller = pair.controller(**readers)
    pair.publish("s1", None)
    controller.step()
    pair.publish("s2", 1, 0.7, 0.8)
    controller.step()
    return controller


def test_challengers_are_judged_one_after_the_other_and_put_into_the_log_once(pair):
    controller = pair.controller()
    controller.step()
    assert pair.heard() == []
    for snapshot_id, parent, figures, champion in [
        ("s1", None, (None, None), 1),
        ("s2", 1, (0.7, 0.8), 2),
        ("s3", 2, (0.8, 0.6), 2),
        ("s4", 3, (0.6, 0.7), 2),
        ("s5", 4, (0.7, 0.9), 5),
    ]:
        pair.publish(snapshot_id, parent, *figures)
        before = pair.metrics.value("omnidraft_promotions_total")
        controller.step()
        controller.step()
        assert pair.champion() == champion
        is_promoted = pair.metrics.value("omnidraft_promotions_total") > before
        assert pair.heard() == ([("champion", champion)] if is_promoted else [])
    assert pair.metrics.value("omnidraft_refusals_total") == 2
    assert pair.judgement(3).startswith("refused: held-out agreement 0.6000")
    assert (pair.previous(), pair.notes(3)["judgement"]) == (2, pair.judgement(3))
    judgement = pair.open().resolve("3").judgement
    assert (judgement.gain, judgement.gain_error) == (pytest.approx(-0.2), 0.001)


class Killed(Exception):
    """The process ended here."""


class Lethal:
    """Kills the controller before or after one of its effects."""

    def __init__(self, number, *, is_done):
        self.number, self.is_done = number, is_done

    def __call__(self, effect, *args):
        self.number -= 1
        if self.number == 0 and not self.is_done:
            raise Killed
        effect(*args)
        if self.number == 0:
            raise Killed


class LethalWriter(MemoryWriter):
    lethal: Lethal

    def append(self, messages):
        self.lethal(super().append, messages)


class LethalRegistry(DirectoryRegistry):
    lethal: Lethal

    def annotate(self, version, notes):
        self.lethal(super().annotate, version, notes)

    def promote(self, version, previous=None):
        self.lethal(super().promote, version, previous)


EFFECTS = ["lease", "promoting", "champion", "alias", "promoted"]


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, len(EFFECTS) + 1), ids=EFFECTS)
def test_whichever_step_of_a_promotion_a_controller_dies_at_the_next_one_goes_on_there(pair, number, is_done):
    of_two_snapshots(pair)
    pair.publish("s3", 2, 0.8, 0.9)
    pair.heard()
    lethal = Lethal(number, is_done=is_done)
    registry, writer = pair.open(LethalRegistry), LethalWriter(pair.log, "control")
    registry.lethal = writer.lethal = lethal
    with pytest.raises(Killed):
        pair.controller(registry=registry, writer=writer).step()
    has_served = pair.heard() == [("champion", 3)]
    assert has_served == ((number, is_done) >= (EFFECTS.index("champion") + 1, True))
    pair.controller().step()
    assert (pair.champion(), pair.previous(), pair.heard()) == (3, 2, [] if has_served else [("champion", 3)])
    assert pair.judgement(3).startswith("promoted: held-out agreement 0.9000")


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 6), ids=["lease", "champion", "answer", "alias", "promoted"])
def test_whichever_step_of_an_order_a_controller_dies_at_the_next_one_goes_on_there(pair, number, is_done):
    of_two_snapshots(pair)
    pair.order(1)
    registry, writer = pair.open(LethalRegistry), LethalWriter(pair.log, "control")
    registry.lethal = writer.lethal = Lethal(number, is_done=is_done)
    with pytest.raises(Killed):
        pair.controller(registry=registry, writer=writer).step()
    for _ in range(2):
        pair.controller().step()
        assert (pair.champion(), pair.previous(), pair.orders()) == (1, 2, [])
    assert pair.judgement(1) == "promoted by an operator"


def test_a_first_snapshot_that_was_not_promoted_after_all_leaves_that_to_the_next_one(pair):
    """The distiller publishes between a judgement and the next try."""
    pair.publish("s1", None)
    pair.judge(1, "promoting", "the first snapshot of this pair")
    pair.publish("s2", 1, 0.7, 0.8)
    pair.controller().step()
    assert pair.champion() == 2
    assert pair.judgement(1) == "promoting: the first snapshot of this pair"
    assert pair.judgement(2).startswith("promoted: held-out agreement 0.8000")


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
def test_the_first_learned_snapshot_is_compared_with_the_base_drafter(pair, has_base, after, error, reason):
    """The base drafter was never judged: it was published, or learned from, before any controller ran."""
    if has_base:
        pair.registry.publish(make_bundle(pair.folder, "base"), None)
    before = None if after is None else 0.7
    version = pair.publish("s1", 1 if has_base else None, before, after, agreement_change_error=error, train="lora")
    pair.controller().step()
    assert reason in pair.judgement(version)
    assert pair.champion() == (version if after == 0.8 else None)


def test_aliases_that_were_lost_are_made_anew_from_the_log(pair):
    controller = of_two_snapshots(pair)
    (pair.version_folder(2).parent / "aliases.json").unlink()
    controller.step()
    assert (pair.champion(), pair.previous()) == (2, 1)


def test_where_log_and_aliases_were_lost_nothing_is_promoted_before_an_operator_names_the_champion(tmp_path):
    of_two_snapshots(Pair(tmp_path))
    pair = Pair(tmp_path)  # with a log that was made anew
    (pair.version_folder(2).parent / "aliases.json").unlink()
    pair.publish("s3", 2, 0.8, 0.9)
    controller = pair.controller()
    controller.step()
    assert pair.champion() is None
    assert pair.judgement(3).startswith("refused: the registry names no champion, but version 2 was promoted before")
    assert "`omnidraft snapshots promote VERSION`" in pair.judgement(3)
    pair.order(2)
    pair.publish("s4", 3, 0.6, 0.9)
    controller.step()
    assert pair.champion() == 4


def test_a_log_that_was_made_anew_goes_on_with_the_champion_of_the_registry(tmp_path):
    of_two_snapshots(Pair(tmp_path))
    pair = Pair(tmp_path)
    pair.controller().step()
    assert (pair.champion(), pair.previous()) == (2, 1)
    assert pair.judgement(2).startswith("promoted: held-out agreement")  # not by an operator


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_alias_that_a_hand_moved_is_an_order_and_not_undone(pair, is_restarted):
    controller = of_two_snapshots(pair)
    assert pair.heard() == [("champion", 2)]
    pair.move_alias(champion=1)
    (pair.controller() if is_restarted else controller).step()
    assert (pair.champion(), pair.previous(), pair.heard()) == (1, 2, [("champion", 1)])
    assert pair.judgement(1) == "promoted by an operator: its alias was moved by hand"
    pair.controller().step()
    assert (pair.champion(), pair.heard()) == (1, [])
    assert pair.metrics.value("omnidraft_rollbacks_total") == 1


def test_where_snapshots_are_signed_an_alias_that_a_hand_moved_is_moved_back(pair, caplog):
    """Who can write to the registry need not be an operator."""
    signing, publish = new_signing(), pair.open
    pair.open = lambda: DirectoryRegistry(pair.folder / "registry", "org/small", "big", keep_resume=9, signing=signing)
    controller = pair.controller(signing=signing)
    pair.publish("s1", None)
    controller.step()
    pair.publish("s2", 1, 0.7, 0.8)
    controller.step()
    assert (pair.champion(), pair.heard()) == (2, [("champion", 2)])
    for version, is_restarted in ((1, False), (None, False), (1, True)):
        pair.move_alias(champion=version)
        controller = pair.controller(signing=signing) if is_restarted else controller
        controller.step()
        assert (pair.champion(), pair.heard()) == (2, [])
    assert "the alias of the champion was moved by hand, and is moved back" in caplog.text
    pair.open = publish
    pair.publish("s3", 2, 0.8, 0.9)
    controller.step()
    pair.order(3)
    controller.step()
    assert pair.champion() == 2  # nobody signed version 3
    assert "the order to promote version 3 is refused: snapshot s3 has no signature" in caplog.text


def test_where_snapshots_are_signed_no_alias_alone_makes_a_champion(pair, caplog):
    pair.registry.publish(make_bundle(pair.folder, "s1"), None)
    pair.registry.promote(1)
    controller = pair.controller(signing=new_signing())
    for _ in range(3):
        controller.step()
    assert pair.heard() == []
    assert caplog.text.count("version 1 is called champion, which nobody signed; say which version serves") == 1


def test_another_snapshot_under_the_champions_version_is_compared_with_nothing(pair, caplog):
    controller = of_two_snapshots(pair)
    folder = pair.version_folder(2) / "snapshot"
    bundle.write_manifest(folder, bundle.read_manifest(folder).model_copy(update={"agreement_after": 0.1}))
    pair.publish("s3", 2, 0.1, 0.2)
    controller.step()
    assert pair.champion() == 2
    assert "version 2 of the registry is not the snapshot that was promoted" in caplog.text
    assert pair.metrics.value("omnidraft_champions_refused_total") == 1


@pytest.mark.parametrize("is_named", [False, True], ids=["deleted", "another named"])
def test_a_deleted_champion_is_told_once_and_replaced_by_no_guess(pair, caplog, is_named):
    """MLflow deletes a version's aliases with it."""
    controller = of_two_snapshots(pair)
    pair.publish("s3", 2, 0.8, 0.9)
    shutil.rmtree(pair.version_folder(2))
    pair.move_alias(champion=1 if is_named else None)
    for _ in range(3):
        controller.step()
    told = (
        "no champion is named any more: version 2 was deleted; say which version serves: `omnidraft snapshots promote"
    )
    assert caplog.text.count(told) == (not is_named)
    if not is_named:
        assert (pair.judgement(3), pair.control().read_whole().champion.version) == ("", 2)
        pair.order(1)
        controller.step()
    assert (pair.champion(), pair.judgement(1)[:23]) == (1, "promoted by an operator")


class DeadWriter:
    """A log that is down."""

    def append(self, messages):
        raise BusError("down")

    def close(self): ...


def test_a_log_that_is_down_does_not_end_the_controller(pair):
    pair.publish("s1", None)
    stop = threading.Event()
    thread = threading.Thread(target=pair.controller(writer=DeadWriter()).run, args=(stop,))
    thread.start()
    while pair.metrics.value("omnidraft_controller_errors_total") < 2:
        assert thread.is_alive()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("orders", [[1], [2, 1], [1, 9, 1]])
def test_the_newest_order_is_carried_out_before_anything_is_judged_and_once(pair, orders):
    controller = of_two_snapshots(pair)
    pair.publish("s3", 2, 0.8, 0.6)
    pair.heard()
    for version in orders:
        pair.order(version)
    controller.step()
    assert (pair.champion(), pair.previous(), pair.orders()) == (1, 2, [])
    assert pair.heard() == [("champion", 1)]
    assert pair.judgement(1) == "promoted by an operator"
    assert "is no ancestor" not in pair.judgement(3)
    pair.controller().step()
    assert pair.heard() == []


def damage(pair):
    (pair.version_folder(1) / "snapshot/manifest.json").write_text("{")


def remove_weights(pair):
    pair.registry.promote(2, 2)
    pair.move_alias(previous=None)
    pair.registry.remove_files(1, ("serving",))


def test_an_order_is_carried_out_when_it_comes_and_not_at_the_next_look_at_the_registry(pair, monkeypatch):
    monkeypatch.setattr("omnidraft.fleet.controller.POLL_S", 2 * PATIENCE_S)
    controller = of_two_snapshots(pair)
    with threads_until_over(controller.run):
        time.sleep(0.5)  # it waits by now
        pair.order(1)
        wait_until(lambda: not pair.orders())
        assert pair.control().read_whole().champion.version == 1
        threading.Timer(0.5, pair.order, [2]).start()  # which ends its wait


@pytest.mark.parametrize(
    ("version", "prepare", "refusal"),
    [
        (99, lambda pair: None, "there is no version 99; there are versions 1 to 2"),
        (1, damage, "not a manifest"),
        (1, remove_weights, "version 1 has no weights any more"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_answered_and_not_tried_again(pair, caplog, version, prepare, refusal):
    of_two_snapshots(pair)
    prepare(pair)
    pair.heard()
    pair.order(version)
    controller = pair.controller()
    for _ in range(2):
        controller.step()
    assert (pair.heard(), pair.orders()) == ([], [])
    assert caplog.text.count(f"the order to promote version {version} is refused: ") == 1
    assert refusal in caplog.text


class Away(DirectoryRegistry):
    """Does not answer while `is_away`."""

    is_away = False

    def resolve(self, name):
        if self.is_away:
            raise RegistryError("no answer")
        return super().resolve(name)


def test_an_order_to_go_back_is_in_force_without_the_registry_which_repeats_it_later(tmp_path):
    pair = Pair(tmp_path)
    pair.registry = pair.open(Away)
    controller = of_two_snapshots(pair)
    pair.heard()
    pair.registry.is_away = True
    pair.order(1)
    controller.meanwhile()
    assert (pair.heard(), pair.orders()) == ([("champion", 1)], [])
    pair.order(2)
    pair.order(1)
    with pytest.raises(RegistryError):
        controller.step()
    pair.registry.is_away = False
    pair.controller().step()
    assert (pair.champion(), pair.judgement(1)) == (1, "promoted by an operator")
    pair.order(9)
    controller = pair.controller()
    controller.step()


class Slow(DirectoryRegistry):
    """Something happens, and is heard of, while it is asked for a version."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.happens = {}

    def resolve(self, name):
        self.happens.pop(name, lambda: None)()
        return super().resolve(name)


@pytest.fixture
def slow(pair):
    """With champion 2, and a version 3 that was refused."""
    pair.registry = pair.open(Slow)
    controller = of_two_snapshots(pair)
    pair.publish("s3", 2, 0.8, 0.7)
    controller.step()
    assert pair.champion() == 2
    return pair, controller


@pytest.mark.parametrize("moved", [None, 3], ids=["of another order", "of an alias that a hand moved"])
def test_an_order_that_is_obeyed_while_the_registry_is_asked_is_not_overruled_by_what_came_before_it(slow, moved):
    pair, controller = slow
    if moved is None:
        pair.order(3)
    else:
        pair.move_alias(champion=moved)
    asked = "3" if moved is None else "2"
    pair.registry.happens[asked] = lambda: (pair.order(1), controller.meanwhile())
    for _ in range(3):
        controller.step()
    assert (pair.champion(), pair.orders(), pair.registry.happens) == (1, [], {})


def test_a_controller_that_hears_of_another_while_the_registry_is_asked_moves_no_alias_any_more(slow):
    pair, controller = slow
    registry = pair.registry

    def happens():
        pair.registry = pair.open()
        second = pair.controller()
        pair.order(1)
        second.step()
        controller.meanwhile()

    registry.happens["2"] = happens
    pair.order(3)
    with pytest.raises(LeaseLost):
        controller.step()
    assert (pair.champion(), pair.orders(), registry.happens) == (1, [], {})


class Asleep(DirectoryRegistry):
    """Its controller notes that it promotes, and falls asleep; meanwhile `happens`."""

    def happens(self) -> None: ...

    def annotate(self, version, notes):
        super().annotate(version, notes)
        happens, self.happens = self.happens, lambda: None
        happens()


@pytest.fixture
def drowsy(pair):
    pair.registry = pair.open(Asleep)
    controller = of_two_snapshots(pair)
    pair.publish("s3", 2, 0.8, 0.9)
    return pair, controller


@pytest.mark.parametrize("promoted", [[1], [3, 2], [2]], ids=["rolled back", "there and back", "shall stay"])
def test_an_operator_who_came_while_the_controller_slept_is_never_overruled(drowsy, promoted):
    pair, controller = drowsy
    pair.registry.happens = lambda: [pair.order(version) for version in promoted]
    for _ in range(3):
        controller.step()
    assert pair.champion() == promoted[-1]
    assert pair.judgement(3) == "refused: an order came first"
    pair.controller().step()
    assert pair.champion() == promoted[-1]
    pair.publish("s4", 3, 0.9, 0.95)
    controller = pair.controller()
    controller.step()
    assert pair.champion() == 4  # the next one is judged against what the operator chose


def test_a_refused_challenger_whose_notes_are_damaged_since_is_not_judged_by_the_next_controller(drowsy):
    pair, controller = drowsy
    pair.registry.happens = lambda: pair.order(1)
    controller.step()
    (pair.version_folder(3) / "notes.json").write_text("{")
    pair.controller().step()
    assert (pair.champion(), pair.judgement(3)) == (1, "refused: its notes are damaged")


@pytest.fixture
def canaries(tmp_path):
    return Pair(tmp_path, ControllerSettings(canary_share=0.1, canary_requests=20, confidence=0.95))


def two_snapshots(canaries):
    controller = of_two_snapshots(canaries)
    assert (canaries.champion(), canaries.heard()) == (1, [("champion", 1), ("canary", 2)])
    return controller


def test_a_canary_that_is_as_fast_becomes_champion(canaries):
    controller = two_snapshots(canaries)
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1)
    controller.step()
    assert (canaries.champion(), canaries.heard()) == (2, [("champion", 2)])
    assert canaries.judgement(2).startswith("promoted: canary")


def test_a_slow_canary_is_thrown_back_with_the_reason_and_its_requests_go_back_to_the_champion(canaries):
    controller = two_snapshots(canaries)
    serve(canaries.traces, 1, 30, seconds=0.1)
    serve(canaries.traces, 2, 30, seconds=0.15)
    controller.step()
    assert (canaries.champion(), canaries.heard()) == (1, [("champion", 1)])
    assert canaries.control().read_whole().canary is None
    assert canaries.judgement(2).startswith("refused: canary")
    controller.step()
    assert canaries.heard() == []


def test_while_a_canary_is_out_the_next_challenger_waits(canaries):
    controller = two_snapshots(canaries)
    canaries.publish("s3", 2, 0.8, 0.9)
    controller.step()
    assert canaries.heard() == []
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1)
    controller.step()
    controller.step()
    assert canaries.champion() == 2
    assert canaries.heard() == [("champion", 2), ("canary", 3)]


def test_a_controller_that_starts_ends_the_canary_of_the_one_before_and_counts_no_requests_from_then(canaries):
    two_snapshots(canaries)
    serve(canaries.traces, 1, 30, seconds=0.1)
    serve(canaries.traces, 2, 30, seconds=0.3)
    after = canaries.controller()
    after.obey()
    assert canaries.control().read_whole().canary is None
    after.step()
    assert canaries.heard() == [("canary", 2)]
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1, first=100)
    after.step()
    assert canaries.champion() == 2


@pytest.mark.parametrize("is_by_hand", [False, True])
@pytest.mark.parametrize("chosen", [1, 2, 3], ids=["shall stay", "the canary", "another"])
def test_an_order_during_a_canary_ends_the_trial_and_is_never_overruled(canaries, chosen, is_by_hand):
    controller = two_snapshots(canaries)
    canaries.publish("s3", 2, 0.8, 0.5)
    if chosen == 1 or not is_by_hand:
        canaries.order(chosen)
    else:
        canaries.move_alias(champion=chosen)
    controller.step()
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1)
    after = canaries.controller()
    for each in (controller, after, after):
        each.step()
        assert canaries.champion() == chosen
    assert canaries.heard()[0] == ("champion", chosen)
    if chosen != 2:
        assert canaries.judgement(2) == "refused: there was another promotion while it was a canary beside 1"


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
    canaries.heard()
    return controller


def test_agreement_that_falls_with_the_traffic_is_told_and_noted_and_so_is_its_return(canaries):
    controller = champion_two(canaries)
    drift_of(canaries, controller, 2, is_good=1, number=80)
    drift_of(canaries, controller, 2, is_good=0, number=20, first=80)
    assert (canaries.heard(), canaries.champion()) == ([("drift", "")], 2)
    assert "agreement of default fell: 1.000 before" in canaries.notes(2)["drift"]
    drift_of(canaries, controller, 2, is_good=1, number=20, first=100)
    assert canaries.heard() == [("drift", None)]
    assert canaries.metrics.value("omnidraft_drift_alarms_total", target="big") == 1


def test_a_change_of_traffic_during_a_canary_is_announced_and_the_champion_stays(canaries):
    controller = champion_two(canaries)
    canaries.publish("s3", 2, 0.9, 0.95)
    controller.step()
    assert canaries.heard() == [("canary", 3)]
    for turn in range(15):
        for version, number in ((2, 6), (3, 1)):
            drift_of(canaries, controller, version, is_good=turn < 12, number=number, first=number * turn)
    assert (canaries.champion(), canaries.heard()) == (2, [("drift", "")])


def test_a_canary_that_agrees_less_is_no_drift_of_the_champion(canaries):
    controller = champion_two(canaries)
    drift_of(canaries, controller, 2, is_good=1, number=40)
    canaries.publish("s3", 2, 0.9, 0.95)
    controller.step()
    assert canaries.heard() == [("canary", 3)]
    for turn in range(15):
        drift_of(canaries, controller, 3, is_good=0, number=1, first=turn)
        drift_of(canaries, controller, 2, is_good=1, number=2, first=40 + 2 * turn)
    assert (canaries.champion(), canaries.heard()) == (2, [])
    serve(canaries.traces, 3, 30, seconds=10.0)
    canaries.now += 1000
    controller.step()
    assert canaries.heard() == [("champion", 2)]
    drift_of(canaries, controller, 3, is_good=0, number=40, first=15)  # it took them before it was refused
    assert (canaries.champion(), canaries.heard()) == (2, [])
    canaries.order(3)
    controller.step()
    drift_of(canaries, controller, 3, is_good=0, number=40, first=55)
    assert ("drift", "") in canaries.heard()


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
    canaries.heard()
    drift_of(canaries, canaries.controller(), 2, is_good=1, number=1, first=60)
    assert canaries.heard() == []


def test_the_snapshot_that_agrees_best_with_the_drifted_traffic_is_taken_while_it_drifts_and_not_after(canaries):
    controller = champion_two(canaries)
    control = canaries.control()

    def best():
        promotion = control.read_whole().champion.promotion
        control.put(("best", "default"), Best(version=1, promotion=promotion), "0.6 on 16 records")

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
    canaries.control().put(("drift", "default", "text"), Drift(level=1.0))
    after = canaries.controller(reader=SilentReader(canaries.log, "control", range(1)))
    with pytest.raises(BusError, match="gave nothing"):
        after.step()
    canaries.heard()
    drift_of(canaries, after, 2, is_good=1, number=40)
    assert canaries.heard() == [("drift", None)]


def test_a_tenant_whose_traffic_drifts_chooses_no_refused_snapshot_for_all(canaries):
    """It agrees best with his newest records, since it was learned from his poison."""
    controller = champion_two(canaries)
    canaries.publish("s3", 2, 0.8, 0.5)
    controller.step()
    assert "refused" in canaries.judgement(3)
    drift_of(canaries, controller, 2, is_good=1, number=80)
    drift_of(canaries, controller, 2, is_good=0, number=20, first=80)
    control = canaries.control()
    promotion = control.read_whole().champion.promotion
    control.put(("best", "default"), Best(version=3, promotion=promotion), "0.9 on 16 records")
    controller.step()
    assert canaries.champion() == 2


def test_a_comparison_from_before_an_order_is_void(canaries):
    controller = champion_two(canaries)
    drift_of(canaries, controller, 2, is_good=1, number=80)
    control = canaries.control()
    promotion = control.read_whole().champion.promotion
    drift_of(canaries, controller, 2, is_good=0, number=40)
    canaries.order(2)
    control.put(("best", "default"), Best(version=1, promotion=promotion), "0.6")
    controller.step()
    assert canaries.champion() == 2


def rewinds(pair):
    """The newest order, if there is one."""
    rewind = pair.control().read_whole().value(Rewind, "rewind")
    return [] if rewind is None else [(rewind.version, rewind.id)]


def judge_all(pair, controller, *afters, first=2):
    """Challengers in a row, each the child of the one before, which agreed 0.7 at first."""
    for number, after in enumerate(afters, first):
        pair.publish(f"s{number}", number - 1, 0.7, after)
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
def test_learning_is_ordered_back_after_so_many_challengers_in_a_row_that_were_worse(pair, afters, ordered):
    controller = pair.controller()
    pair.publish("s1", None)
    controller.step()
    judge_all(pair, controller, *afters)
    assert pair.champion() == 1
    assert rewinds(pair) == ordered


def test_a_promotion_starts_the_count_anew(pair):
    controller = pair.controller()
    pair.publish("s1", None)
    controller.step()
    judge_all(pair, controller, *[0.69] * 5, 1.0)
    assert pair.champion() == 7
    judge_all(pair, controller, *[0.69] * 5, first=8)
    assert rewinds(pair) == []
    judge_all(pair, controller, 0.69, first=13)
    assert rewinds(pair) == [(7, "s13")]


def test_a_version_that_an_operator_sent_learning_back_to_is_left_only_after_as_many_that_were_worse_since(pair):
    controller = pair.controller()
    pair.publish("s1", None)
    controller.step()
    judge_all(pair, controller, *[0.69] * 5)
    pair.control().put(("rewind",), Rewind(version=2, id="s6", is_ordered=True))
    judge_all(pair, controller, *[0.69] * 5, first=7)
    assert rewinds(pair) == [(2, "s6")]
    judge_all(pair, controller, 0.69, first=12)
    assert rewinds(pair) == [(1, "s12")]


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


class Silent(MemoryReader):
    """A log of traces that does not answer, until it does."""

    def __init__(self, log):
        super().__init__(log, "traces")
        self.answers = threading.Event()
        self.answers.set()

    def poll(self, max_messages, timeout_s):
        self.answers.wait(PATIENCE_S)
        return super().poll(max_messages, timeout_s)


def test_while_the_log_does_not_say_what_a_canary_served_its_trial_is_not_over(canaries, monkeypatch):
    reader = Silent(canaries.log)
    traffic = RequestStatsReader(reader, target="big", drafter="org/small")
    controller = of_two_snapshots(canaries, traffic=traffic)
    serve(canaries.traces, 1, 100, seconds=0.1)
    controller.step()
    reader.answers.clear()
    serve(canaries.traces, 2, 10, seconds=0.1)
    canaries.now += 700
    monkeypatch.setattr("omnidraft.fleet.request_stats.ANSWER_S", 0.05)
    controller.step()
    assert canaries.judgement(2).startswith("on trial")
    reader.answers.set()
    monkeypatch.setattr("omnidraft.fleet.request_stats.ANSWER_S", PATIENCE_S)
    controller.step()
    assert canaries.judgement(2).startswith("promoted: canary")
    assert "over 10 requests" in canaries.judgement(2)


class Gone(MemoryReader):
    """A topic that was deleted."""

    def poll(self, max_messages, timeout_s):
        raise BusError("gone")


def test_an_order_to_rewind_does_not_wait_for_the_traces(canaries):
    traffic = RequestStatsReader(Gone(canaries.log, "traces"), target="big", drafter="org/small")
    controller = canaries.controller(traffic=traffic)
    canaries.publish("s1", None)
    for number in range(2, 9):
        with pytest.raises(BusError, match="gone"):
            controller.step()
        canaries.publish(f"s{number}", number - 1, 0.7, 0.69)
    assert (canaries.champion(), rewinds(canaries)) == (1, [(1, "s7")])


class WithoutRewinds(MemoryWriter):
    """A log that refuses the first orders to rewind."""

    num_left = 3

    def append(self, messages):
        if messages[0].key.startswith(b"rewind") and self.num_left:
            self.num_left -= 1
            raise BusError("down")
        super().append(messages)


def test_an_order_to_rewind_that_the_log_refused_is_given_later_once(pair):
    controller = pair.controller(writer=WithoutRewinds(pair.log, "control"))
    pair.publish("s1", None)
    controller.step()
    judge_all(pair, controller, *[0.69] * 5)
    pair.publish("s7", 6, 0.7, 0.69)
    for _ in range(WithoutRewinds.num_left):
        with pytest.raises(BusError):
            controller.step()
    controller.step()
    entry = pair.control().read_whole().entries[("rewind",)]
    assert (entry.value.id, entry.reason) == (
        "s7",
        "6 challengers in a row were worse than champion 1, or not to be compared with it",
    )
    judge_all(pair, controller, *[0.69] * 5, first=8)
    assert rewinds(pair) == [(1, "s7")]


def test_a_canary_whose_version_is_deleted_ends_and_the_next_challenger_is_judged(canaries):
    controller = two_snapshots(canaries)
    for version in (1, 2):
        serve(canaries.traces, version, 30, seconds=0.1)
    canaries.publish("s3", 2, 0.8, 0.9)
    shutil.rmtree(canaries.version_folder(2))
    controller.step()
    assert canaries.heard() == [("champion", 1)]
    controller.step()
    assert canaries.judgement(3)
