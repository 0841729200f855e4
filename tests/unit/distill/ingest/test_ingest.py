"""A learner that lags: which records it still learns, that all others are counted, and that the audit can decide."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from omnidraft.distill.control import TrainingControl
from omnidraft.ports import Outgoing, Restart
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryWriter
from tests.audit_case import CLEAN, HELD_OUT_EVERY, case_of
from tests.control_logs import Orders
from tests.distiller_runs import Killed, Setting, learned, names, run_until_idle

LIMIT = {"max_lag_records": 30}
"""Of which the newest three are kept."""
PASSED_OVER = "omnidraft_traces_skipped_total"


@pytest.fixture(scope="module", autouse=True)
def no_waits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omnidraft.distill.ingest.ingest.CHECK_S", 0.0)
        yield


def run_to_the_end(distillation) -> None:
    """Passing records, three a poll, is not idling."""
    run_until_idle(distillation, 120)


def crowd(setting: Setting, num: int, start: int = 0) -> None:
    """Records, with others', repeated and broken messages between."""
    for number, name in enumerate(names(num, start=start), start):
        setting.emit(name)
        if number % 5 == 0:
            setting.emit(f"theirs-{number}", target="another")
        if number % 7 == 0:
            MemoryWriter(setting.log, "t").append([Outgoing(name.encode(), b"junk")])
            setting.emit(name)


def counted(setting: Setting) -> Iterator[tuple[int, int]]:
    """Yield the number of messages that each snapshot accounts for, and the sum of its offsets."""
    for version in setting.registry.versions():
        manifest = version.manifest
        apart = ("held_out", "duplicate", "passed_over", "other_pair", "unknown_schema")
        num_skipped = sum(manifest.counts.get(name, 0) for name in apart)
        yield manifest.num_records + num_skipped, sum(manifest.offsets.values())


def passed_over(setting: Setting) -> list[int]:
    """Return the number of messages that each snapshot passed over, by the offsets in its manifest."""
    manifests = [version.manifest for version in setting.registry.versions()]
    return [sum(each.offsets[partition] - first for partition, first in each.passed_over.items()) for each in manifests]


def test_after_an_outage_learning_goes_on_at_the_newest_messages_and_counts_all_others(pair, tmp_path: Path) -> None:
    setting = Setting(pair, tmp_path, partitions=2)
    setting.emit(*names(4))
    run_to_the_end(setting.distiller(**LIMIT)[0])
    num_before = setting.manifest().num_records
    setting.emit(*names(96, start=4))  # while nobody learns
    metrics = CountingMetrics()
    distillation, journal = setting.distiller(metrics=metrics, **LIMIT)
    run_to_the_end(distillation)
    manifest, (number,) = setting.manifest(), filter(None, passed_over(setting))
    assert num_before + len(learned(journal)) + number == sum(manifest.offsets.values()) >= 100 - 1  # steps have two
    assert 4 < len(learned(journal)) <= 4 + 3  # two steps before the first snapshot, and the newest
    assert metrics.value(PASSED_OVER, reason="passed_over") == manifest.counts["passed_over"] == number
    assert distillation.status().skipped["passed_over"] == number
    assert all(num_counted == num_passed for num_counted, num_passed in counted(setting))
    setting.emit(*names(10, start=100))  # what comes after that is learned whole again
    again, after = setting.distiller(**LIMIT)
    run_to_the_end(again)
    assert set(names(9, start=100)) <= set(learned(after))


def test_without_a_limit_or_below_it_every_record_is_learned(pair, tmp_path: Path) -> None:
    for number, limit in enumerate((0, 40)):
        setting = Setting(pair, tmp_path / str(number))
        setting.emit(*names(40))
        distillation, journal = setting.distiller(max_lag_records=limit)
        run_to_the_end(distillation)
        assert learned(journal) == names(40)
        assert not any(passed_over(setting))


@pytest.mark.parametrize(("partitions", "die_after"), [(1, 3), (3, 2)])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_after_it_passed_over_messages(
    pair, tmp_path: Path, partitions: int, die_after: int
) -> None:
    whole, broken = (Setting(pair, tmp_path / name, partitions=partitions) for name in ("whole", "broken"))
    for setting in (whole, broken):
        crowd(setting, 60)
    run_to_the_end(whole.distiller(held_out_every=HELD_OUT_EVERY, **LIMIT)[0])
    with suppress(Killed):
        run_to_the_end(broken.distiller(held_out_every=HELD_OUT_EVERY, die_after=die_after, **LIMIT)[0])
    assert any(passed_over(broken))
    run_to_the_end(broken.distiller(held_out_every=HELD_OUT_EVERY, **LIMIT)[0])
    left, right = whole.masters(), broken.masters()
    assert all(torch.equal(left[name], right[name]) for name in left)
    same = ("offsets", "num_records", "num_steps", "counts", "agreement_after")
    assert [getattr(whole.manifest(), name) for name in same] == [getattr(broken.manifest(), name) for name in same]


@pytest.mark.parametrize(("partitions", "die_after"), [(1, None), (3, 1)])
def test_counts_are_the_offsets_and_the_audit_is_clean_whenever_the_learner_died(
    pair, tmp_path: Path, partitions: int, die_after: int | None
) -> None:
    """Several deaths, before and after messages were passed over, and more messages meanwhile."""
    setting = Setting(pair, tmp_path, partitions=partitions)
    for start in (0, 40, 80):
        crowd(setting, 40, start)
        if die_after is not None:
            dying, _ = setting.distiller(held_out_every=HELD_OUT_EVERY, die_after=die_after, **LIMIT)
            with suppress(Killed):
                run_to_the_end(dying)
    for start, num in ((120, 5), (130, 30)):
        crowd(setting, num, start)
        run_to_the_end(setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMIT)[0])
    assert all(num_counted == num_passed for num_counted, num_passed in counted(setting))
    assert setting.manifest().counts["passed_over"] == sum(passed_over(setting)) > 40
    case = case_of(setting)
    assert case.audit().faults == ()
    case.seen_keys = None
    assert case.audit().faults == ()


def test_where_an_operator_says_to_restart_nothing_is_passed_over(pair, tmp_path: Path) -> None:
    setting = Setting(pair, tmp_path)
    setting.emit(*names(60))
    with suppress(Killed):
        run_to_the_end(setting.distiller(die_after=2, **LIMIT)[0])
    control = TrainingControl(Orders((0, ("restart",), Restart(start="earliest", id="one"))))
    restarted, journal = setting.distiller(control=control, die_after=1, **LIMIT)
    with suppress(Killed):
        run_to_the_end(restarted)
    assert (setting.manifest().offsets, setting.manifest().passed_over) == ({0: 0}, {})
    assert learned(journal) == names(2)
    assert case_of(setting).kinds() == CLEAN


@pytest.fixture(scope="module")
def learned_late(pair, tmp_path_factory: pytest.TempPathFactory):
    setting = Setting(pair, tmp_path_factory.mktemp("lagged"), partitions=2)
    crowd(setting, 60)
    run_to_the_end(setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMIT)[0])
    return case_of(setting)


@pytest.fixture
def lagged(learned_late, tmp_path: Path):
    """A log of which a part was passed over."""
    case = learned_late.copy(tmp_path / "log.db")
    assert case.kinds() == CLEAN
    assert case.versions[-1].manifest.counts["passed_over"] > 20
    return case


@pytest.mark.parametrize(
    ("changed", "lost"),
    [({"learned": -1, "passed_over": 1}, 1), ({"learned": -3, "passed_over": 3}, 3), ({"passed_over": -2}, 2)],
    ids=str,
)
def test_a_loss_cannot_hide_among_records_that_were_passed_over(lagged, changed, lost) -> None:
    manifest = lagged.versions[-1].manifest
    counts = {"learned": manifest.num_records, **manifest.counts}
    counts |= {name: counts[name] + number for name, number in changed.items()}
    lagged.retell(-1, num_records=counts.pop("learned"), counts=counts)
    assert lagged.kinds()["lost"] == lost


def test_passing_over_messages_without_saying_which_is_a_loss(lagged) -> None:
    for place in range(len(lagged.versions)):
        lagged.retell(place, passed_over={})
    assert lagged.kinds()["lost"] > 20


def test_what_retention_deleted_is_no_fault_and_the_rest_of_the_range_is_still_decided(lagged) -> None:
    lagged.execute("DELETE FROM messages WHERE topic = 't' AND partition = 0 AND offset < 2")
    report = lagged.audit()
    assert report.faults == ()
    assert sum(each.fates.get("passed_over", 0) for each in report.partitions) > 20
