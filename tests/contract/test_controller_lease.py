"""What a second controller can do that is started by mistake, and what it cannot: over real logs and registries."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from omnidraft.bus.sqlite_log import SqliteReader
from omnidraft.config import ControllerSettings
from omnidraft.errors import LeaseLost, RegistryError
from omnidraft.fleet.control_log import ControlLog
from omnidraft.fleet.controller import Controller
from omnidraft.fleet.lease import ControllerLease
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.ports import Champion, Lease, Order, Registry
from omnidraft.snapshots.manifest import digest
from omnidraft.telemetry.metrics import CountingMetrics
from tests.contract.registries import Pair, on_mlflow_too
from tests.control_logs import control_in

FIGURES = {"held_out_records": 8, "agreement_before": 0.7, "agreement_after": 0.8, "agreement_change_error": 0.001}


class Fleet:
    """A pair with the champion 1, the better challenger 2, and a log in a file."""

    def __init__(self, store: Pair, folder: Path) -> None:
        self.store, self.path = store, folder / "log.db"
        self.registry = store.open()
        self.registry.publish(store.bundle("s1"), None)
        self.controller().step()
        self.registry.publish(store.bundle("s2", parent_id="s1", **FIGURES), 1)

    def control(self) -> ControlLog:
        return control_in(self.path, target=self.store.target)

    def controller(self, *, registry: Registry | None = None, lock: FileLock | None = None) -> Controller:
        registry, lease = registry or self.store.open(), ControllerLease(self.control(), lock=lock)
        traffic = RequestStatsReader(SqliteReader(self.path, "traces"), target="big", drafter="small")
        return Controller(registry, lease, traffic, CountingMetrics(), ControllerSettings(), target="big")

    def order(self, version: int) -> None:
        self.control().put(("order", uuid.uuid4().hex), Order(version=version))

    def champions(self) -> tuple[int | None, int]:
        """By the log, and by the registry."""
        champion = self.control().read_whole().champion
        return champion and champion.version, self.registry.resolve("champion").version


@pytest.fixture
def fleet(store: Pair, tmp_path: Path) -> Fleet:
    return Fleet(store, tmp_path)


class Frozen:
    """A registry in one of whose calls its process is stopped, while `meanwhile` happens."""

    def __init__(self, registry: Registry, call: str, meanwhile: Callable[[], None]) -> None:
        self._registry, self._call, self._meanwhile = registry, call, meanwhile

    def __getattr__(self, name: str):
        if name == self._call:
            self._call = ""
            self._meanwhile()
        return getattr(self._registry, name)


@on_mlflow_too
def test_the_newest_controller_decides_and_the_one_before_ends(fleet: Fleet) -> None:
    first, second = fleet.controller(), fleet.controller()
    first.step()
    assert fleet.champions() == (2, 2)
    second.step()
    fleet.order(1)
    with pytest.raises(LeaseLost, match="another controller was started for this pair"):
        first.step()
    assert fleet.champions() == (2, 2)
    second.step()
    assert fleet.champions() == (1, 1)


@on_mlflow_too
def test_a_controller_that_was_frozen_in_a_decision_promotes_nothing_once_another_has_the_lease(fleet: Fleet) -> None:
    def another() -> None:
        fleet.order(1)
        second.obey()
        second.align()

    second = fleet.controller()
    first = fleet.controller(registry=Frozen(fleet.store.open(), "annotate", another))
    with pytest.raises(LeaseLost):
        first.step()
    assert fleet.champions() == (1, 1)
    judgement = fleet.registry.resolve("2").judgement
    assert judgement is not None
    assert judgement.state == "promoting"  # which is not final: it is judged again, by the one with the lease
    second.step()
    assert fleet.champions() == (2, 2)


@on_mlflow_too
def test_all_that_a_frozen_controller_can_do_is_move_the_alias_to_what_it_had_put_into_the_log(fleet: Fleet) -> None:
    """The next one cannot tell that from an operator's hand."""
    second = fleet.controller()

    def another() -> None:
        second.step()
        fleet.order(1)
        second.step()
        assert fleet.champions() == (1, 1)

    first = fleet.controller(registry=Frozen(fleet.store.open(), "promote", another))
    first.step()
    assert fleet.champions() == (1, 2)
    with pytest.raises(LeaseLost):
        first.step()
    second.step()
    assert fleet.champions() == (2, 2)
    fleet.order(1)
    second.step()
    assert fleet.champions() == (1, 1)


def test_a_champion_put_by_a_controller_that_had_lost_its_lease_is_followed_by_nobody(fleet: Fleet) -> None:
    """It was frozen between its look at the log and its writing."""
    first, follower = fleet.control(), fleet.control()
    lease = first.read_whole().sequence("lease")
    second = fleet.controller()
    second.obey()
    manifest = fleet.registry.resolve("2").manifest
    first.put(("champion",), Champion(version=2, digest=digest(manifest), lease=lease, promotion="late"))
    assert follower.read_whole().champion is None  # so what serves goes on
    third = fleet.controller()
    third.obey()
    assert follower.poll(0)[0].champion is None
    third.step()
    state = follower.poll(0)[0]
    assert (state.champion.version, state.champion.promotion != "late") == (2, True)  # judged, not taken over
    assert isinstance(state.value(Lease, "lease"), Lease)


def test_the_holder_of_the_lease_overwrites_what_another_put_that_had_lost_it(fleet: Fleet) -> None:
    first = fleet.control()
    lease = first.read_whole().sequence("lease")
    second = fleet.controller()
    second.obey()
    first.put(("champion",), Champion(version=2, lease=lease, promotion="late"))
    second.obey()
    state = fleet.control().read_whole()
    assert (state.champion.version, state.entries[("champion",)].value.version) == (1, 1)


def test_beside_a_log_of_this_machine_a_second_controller_does_not_start_while_the_first_lives(
    fleet: Fleet, tmp_path: Path
) -> None:
    first, second = (fleet.controller(lock=FileLock(tmp_path / "controller.lock")) for _ in range(2))
    first.obey()
    with pytest.raises(LeaseLost, match="another controller runs for this pair: it holds "):
        second.step()
    first.step()
    assert fleet.champions() == (2, 2)
    first.close()
    second.step()


def test_the_champion_is_put_again_before_it_is_too_old_for_who_starts(fleet: Fleet) -> None:
    now_s, sequences = time.time(), []
    control = control_in(fleet.path, target=fleet.store.target, clock=lambda: now_s)
    lease = ControllerLease(control, restate_s=100.0, now=lambda: now_s)
    for seconds in (0, 90, 20, 90, 20):
        now_s += seconds
        lease.follow()
        sequences.append(lease.state.sequence("champion"))
    first, second, third = sorted(set(sequences))
    assert sequences == [first, first, second, second, third]


@on_mlflow_too
@pytest.mark.parametrize("num_done", [0, 1])
def test_a_promotion_that_fails_half_way_in_the_registry_is_finished_by_the_next_step(
    fleet: Fleet, num_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = fleet.controller()
    controller.step()
    fleet.order(1)
    left = [num_done]

    def fail(self, *args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("no answer")
        return move(self, *args)

    if hasattr(fleet.store, "client"):
        from mlflow import MlflowClient as Owner

        name = "set_registered_model_alias"
    else:
        from omnidraft.registry.directory_registry import DirectoryRegistry as Owner

        name = "_write_aliases"
        left[0] = 0
    move = getattr(Owner, name)
    with monkeypatch.context() as failing:
        failing.setattr(Owner, name, fail)
        with pytest.raises(RegistryError, match="no answer"):
            controller.step()
    controller.step()
    assert fleet.champions() == (1, 1)
    assert fleet.registry.resolve("previous").version == 2
