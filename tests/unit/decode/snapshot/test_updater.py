"""A worker follows the champion, and nothing that goes wrong on the way reaches the requests."""

import threading

import pytest

from omnidraft.files import sha256_of
from omnidraft.ports import Forget
from omnidraft.snapshots import bundle
from tests.signed_fleet import new_signing
from tests.snapshot_folders import make_bundle
from tests.snapshot_followers import Worker, canary, champion

FAILURES = "omnidraft_snapshot_load_failures_total"


@pytest.fixture
def worker(tmp_path):
    return Worker(tmp_path)


def test_an_announced_snapshot_is_loaded_and_swapped_in(worker):
    assert worker.step(champion(1)) == 1
    assert worker.step(champion(2)) == 2
    assert len(worker.metrics.observed("omnidraft_snapshot_swap_seconds")) == 2
    assert worker.metrics.value("omnidraft_snapshot_version_info", target="big", drafter="org/small") == 2


def test_until_the_log_names_a_champion_it_is_taken_from_the_registry(worker):
    assert worker.step() is None
    worker.registry.promote(2)
    assert worker.step() == 2
    loaded = worker.slot.current
    assert worker.step(champion(2)) == 2  # the log tells it late: nothing is loaded or swapped
    assert (worker.loads, worker.slot.current is loaded) == ([2], True)
    worker.registry.promote(1)
    assert worker.step() == 2  # one writes the aliases, and says so in the log
    assert worker.step(champion(1)) == 1


def test_where_values_are_signed_the_registry_names_no_champion(tmp_path):
    worker = Worker(tmp_path, follows_registry=False)
    worker.registry.promote(2)
    assert worker.step() is None
    assert worker.step(champion(1)) == 1
    worker.unfit = {3}
    assert (worker.step(champion(3)), worker.loads) == (1, [1, 3])


def test_a_rollback_to_the_previous_loads_nothing(worker):
    worker.step(champion(1))
    worker.step(champion(2))
    assert worker.step(champion(1)) == 1
    assert worker.loads == [1, 2]


def test_a_snapshot_that_cannot_be_loaded_is_counted_and_retried_with_growing_pauses(worker):
    worker.registry.promote(2)
    worker.step(champion(1))
    worker.unfit = {2}
    assert [worker.step(champion(2)), *[worker.step() for _ in range(5)]] == [1] * 6
    assert (worker.loads, worker.metrics.value(FAILURES)) == ([1, 2], 1)
    worker.now += 0.0015
    worker.step()
    worker.now += 0.0015  # the second pause is twice as long
    worker.step()
    assert worker.loads == [1, 2, 2]
    worker.unfit = set()
    worker.now += 1
    assert worker.step() == 2


def test_after_a_bad_snapshot_the_next_one_is_taken_at_once(worker):
    worker.unfit = {1}
    assert worker.step(champion(1)) is None
    assert worker.step(champion(2)) == 2


def test_a_champion_whose_weights_are_deleted_leaves_the_old_one_in_place(worker):
    worker.step(champion(3))
    worker.registry.promote(4)
    worker.registry.remove_files(2, ("serving",))
    assert worker.step(champion(2)) == 3  # counted
    assert worker.metrics.value(FAILURES) == 1
    assert worker.step(champion(4)) == 4


def test_where_the_champion_cannot_be_loaded_at_the_start_the_previous_one_serves(worker):
    worker.registry.promote(2)
    worker.registry.promote(3)
    worker.unfit = {3}
    assert worker.step(champion(3)) == 2
    worker.unfit, worker.now = set(), 1.0
    assert worker.step() == 3


def test_a_worker_that_serves_stays_with_what_it_has_whatever_was_champion_before(worker):
    for version in (2, 3):
        worker.registry.promote(version)
    worker.unfit = {3}
    assert [worker.step(champion(1)), worker.step(champion(3))] == [1, 1]


def test_a_corrupt_snapshot_leaves_the_old_one_in_place(worker):
    worker.step(champion(1))
    (worker.folder / "bundles/s2" / bundle.DRAFTER).write_bytes(b"rotten")
    assert worker.step(champion(2)) == 1
    assert worker.loads == [1]
    assert worker.metrics.value(FAILURES) == 1


def test_a_log_and_a_registry_that_are_down_are_survived(worker):
    worker.step(champion(1))
    worker.registry.is_down = worker.control.is_down = True
    assert worker.step(champion(2)) == 1
    worker.control.is_down = False
    assert worker.step() == 1
    worker.registry.is_down, worker.now = False, 1.0
    assert worker.step() == 2
    assert worker.metrics.value("omnidraft_refresh_errors_total") == 1
    assert worker.metrics.value(FAILURES) == 1


def test_a_canary_is_loaded_beside_the_champion_and_promoted_without_loading_it_again(worker):
    worker.step(champion(1))
    assert worker.step(canary(2)) == 1
    assert (worker.slot.canary.snapshot.version, worker.slot.canary.share) == (2, 0.5)
    assert worker.step(champion(2)) == 2
    assert (worker.slot.canary, worker.slot.previous.version, worker.loads) == (None, 1, [1, 2])


def test_a_champion_that_is_announced_again_ends_the_canary_and_its_files_go(worker):
    worker.step(champion(1))
    worker.step(canary(2))
    assert worker.step(champion(1)) == 1
    assert worker.slot.canary is None
    assert [path.name for path in (worker.folder / "staging").iterdir() if path.is_dir()] == ["v000001-s1"]


def test_a_worker_that_starts_while_a_canary_is_out_takes_both(worker):
    worker.registry.promote(1)
    assert worker.step(canary(2)) == 1
    assert worker.slot.canary.snapshot.version == 2
    worker.step()  # nothing new: both stay
    assert (worker.slot.canary.snapshot.version, worker.loads) == (2, [1, 2])


def test_a_canary_that_cannot_be_loaded_is_tried_again_and_the_champion_serves_all(worker):
    worker.step(champion(1))
    worker.unfit = {2}
    assert worker.step(canary(2)) == 1
    assert (worker.slot.canary, worker.metrics.value(FAILURES)) == (None, 1)
    worker.unfit, worker.now = set(), 1.0
    worker.step()
    assert worker.slot.canary.snapshot.version == 2


def test_a_champion_during_a_canary_ends_it(worker):
    worker.step(champion(1))
    worker.step(canary(2))
    assert worker.step(champion(3)) == 3
    worker.step()
    assert worker.slot.canary is None


def test_a_canary_that_ended_during_its_load_never_serves(worker):
    worker.step(champion(1))
    load = worker.load

    def ended_meanwhile(version, folder):
        worker.fleet.put(*champion(1))
        worker.updater._follow()
        return load(version, folder)

    worker.updater._loading._loader = ended_meanwhile
    assert worker.step(canary(2)) == 1
    assert (worker.slot.canary, worker.loads) == (None, [1, 2])


def test_files_of_snapshots_that_are_no_longer_loaded_are_removed(worker):
    for version in (1, 2, 3, 4):
        worker.step(champion(version))
    folders = [path.name for path in (worker.folder / "staging").iterdir() if path.is_dir()]
    assert sorted(folders) == ["v000003-s3", "v000004-s4"]


def test_the_thread_ends_when_told(worker):
    stop = threading.Event()
    thread = threading.Thread(target=worker.updater.run, args=(stop,))
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


def test_a_forged_snapshot_whose_checksums_fit_leaves_the_old_one_in_place(tmp_path):
    worker = Worker(tmp_path, signing=new_signing())
    assert worker.step(champion(1)) == 1
    folder = tmp_path / "registry" / "omnidraft.org-small.big" / "v000002" / "snapshot"
    weights = folder / bundle.DRAFTER
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    manifest = bundle.read_manifest(folder)
    bundle.write_manifest(
        folder, manifest.model_copy(update={"sha256": {**manifest.sha256, bundle.DRAFTER: sha256_of(weights)}})
    )
    bundle.verify(folder, ["serving"])
    assert worker.step(champion(2)) == 1
    assert worker.metrics.value(FAILURES, target="big") == 1
    assert worker.loads == [1]
    assert worker.step(champion(3)) == 3


def test_an_order_to_forget_drops_prefixes_and_the_snapshot_from_before_it_once_another_serves(tmp_path):
    dropped = []
    worker = Worker(tmp_path, forget=lambda: dropped.append("prefixes"))
    worker.registry.publish(make_bundle(tmp_path / "more", "s5", forgets=("order",)), 4)
    worker.registry.publish(make_bundle(tmp_path / "more", "s6", forgets=("order",)), 5)
    worker.step(champion(3))
    worker.step((("forget", "t"), Forget(id="order", until_ms=1)))
    assert dropped == ["prefixes"]
    worker.step(champion(5))
    assert [each.version for each in worker.slot.loaded] == [5]
    assert [path.name[:7] for path in (tmp_path / "staging").glob("v*")] in ([], ["v000005"])
    worker.step(champion(6))
    assert ([each.version for each in worker.slot.loaded], dropped) == ([6, 5], ["prefixes"])
