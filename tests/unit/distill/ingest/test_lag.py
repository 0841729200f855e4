"""A learner that lags: which records it still learns, that all others are counted, and that the audit can tell."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.distill.ingest.backlog_sampler import BacklogSampler
from omnidraft.distill.ingest.stratified_recent_sample import StratifiedRecentSample
from omnidraft.distill.ingest.trace_consumer import PolledRecords
from omnidraft.ports import Outgoing
from omnidraft.testing.memory_log import MemoryWriter
from tests.audit_case import CLEAN, HELD_OUT_EVERY, case_of
from tests.distiller_runs import Killed, Setting, SlowReader, names, run_until_idle
from tests.trace_records import make_record

LIMITS = {"max_lag_records": 12, "lag_sample_records": 8}


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnidraft.distill.ingest.lag.CHECK_S", 0.0)
    monkeypatch.setattr("omnidraft.distill.retrying.WAITS_S", (0.0,))


def run_to_the_end(distillation) -> None:
    """Reading past records, three a poll, is no standstill."""
    run_until_idle(distillation, 120)


items = st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(0, 20)), max_size=60)


@given(items=items, capacity=st.integers(1, 12), seed=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_a_sample_does_not_depend_on_the_order_and_is_even_and_of_each_tenant_the_newest(items, capacity, seed) -> None:
    numbered = [(tenant, (time_ms, 0, at), (tenant, time_ms, at)) for at, (tenant, time_ms) in enumerate(items)]
    found = []
    for _ in range(2):
        sample: StratifiedRecentSample[tuple[str, int, int]] = StratifiedRecentSample(capacity)
        gone = [sample.add(*each) for each in numbered]
        found.append(frozenset(sample))
        assert len(sample) + sum(each is not None for each in gone) == len(numbered)
        random.Random(seed).shuffle(numbered)
    assert found[0] == found[1]
    there, kept = (Counter(tenant for tenant, *_ in each) for each in (items, found[0]))
    assert kept.total() == min(capacity, len(items))
    most = max(kept.values(), default=0)
    assert all(kept[tenant] >= min(there[tenant], most - 1) for tenant in there)
    for tenant, number in kept.items():
        newest = sorted(((time_ms, at) for name, (time_ms, _, at), _ in numbered if name == tenant), reverse=True)
        assert {(time_ms, at) for name, time_ms, at in found[0] if name == tenant} == set(newest[:number])


def test_passing_a_million_records_keeps_no_more_than_the_sample() -> None:
    """Counted in what is held; a record here is one object, so that making them takes no time."""
    record, num, at_once = make_record(num_emitted=1, num_kept=1), 100_000, 1000
    passing = BacklogSampler({}, {0: num}, num_kept=50)
    for first in range(0, num, at_once):
        records = [(0, offset, record) for offset in range(first, first + at_once) if offset % 7]
        others = [(0, offset, "other_pair", 1) for offset in range(first, first + at_once) if offset % 7 == 0]
        passing.update(PolledRecords(tuple(records), {0: first + at_once}, tuple(others)))
        assert len(passing._skips[0]._before) <= 51
        assert len(passing._sample._largest_first) < 100
    assert passing.has_reached_the_end()
    assert [offset for _, offset, _ in passing.kept()] == [n for n in range(num - 59, num) if n % 7][-50:]
    counts = Counter[str]()
    for _, _, reason, number in passing.skipped():
        counts[reason] += number
    assert counts == {"other_pair": (num + 6) // 7, "sampled_out": num - (num + 6) // 7 - 50}


def crowd(setting: Setting, num: int, start: int = 0) -> None:
    """Records of two tenants, three of four of the first, with others' and broken messages between."""
    for number, name in enumerate(names(num, start=start), start):
        tenant = "small" if number % 4 == 0 else "large"
        setting.emit(name, tenant=tenant, time_ms=1_764_000_000_000 + number)
        if number % 5 == 0:
            setting.emit(f"theirs-{number}", target="another")
        if number % 7 == 0:
            MemoryWriter(setting.log, "t").append([Outgoing(name.encode(), b"junk")])
            setting.emit(name, tenant=tenant, time_ms=1_764_000_000_000 + number)


def counted(setting: Setting) -> Iterator[tuple[int, int]]:
    """Of each snapshot: what it accounts for, and its offsets."""
    for version in setting.registry.versions():
        manifest = version.manifest
        apart = ("held_out", "duplicate", "sampled_out", "other_pair", "unknown_schema")
        told = sum(manifest.counts.get(name, 0) for name in apart)
        yield manifest.num_records + told, sum(manifest.offsets.values())


def test_the_newest_records_of_every_tenant_are_learned_when_too_many_wait(pair, tmp_path: Path, caplog) -> None:
    setting = Setting(pair, tmp_path, partitions=2)
    for number, name in enumerate(names(40)):
        setting.emit(name, tenant="small" if number % 10 == 0 else "large", time_ms=1_764_000_000_000 + number)
    distillation, journal = setting.distiller(**LIMITS)
    run_to_the_end(distillation)
    learned = sorted(name for batch in journal.batches for name in batch)
    assert learned == sorted(names(4, start=36) + [f"request-{number:03d}" for number in (0, 10, 20, 30)])
    manifest = setting.manifest()
    assert (manifest.num_records, manifest.counts) == (8, {"sampled_out": 32})
    assert sum(manifest.offsets.values()) == 40
    (told,) = [record.getMessage() for record in caplog.records if "learning lags" in record.getMessage()]
    assert "of 40 records passed" in told
    assert "newest 8 of 2 tenants are learned, 32 are not" in told
    metrics = distillation._metrics
    assert metrics.value("omnidraft_traces_skipped_total", reason="sampled_out") == 32
    assert [metrics.value("omnidraft_log_lag_records", partition=partition) for partition in "01"] == [0, 0]


def test_without_a_limit_or_below_it_every_record_is_learned(pair, tmp_path: Path) -> None:
    for number, limit in enumerate((None, 0, 40)):
        setting = Setting(pair, tmp_path / str(number))
        setting.emit(*names(40))
        distillation, journal = setting.distiller(max_lag_records=limit, lag_sample_records=8)
        run_to_the_end(distillation)
        assert [name for batch in journal.batches for name in batch] == names(40)
        assert setting.manifest().lag_samples == ()


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("die_after", [None, 1, 2, 3])
def test_counts_are_the_offsets_and_the_audit_is_clean_whenever_the_learner_died(
    pair, tmp_path: Path, partitions: int, die_after: int | None
) -> None:
    """Several deaths, each in the middle of a sample, and more records while it is learned."""
    setting = Setting(pair, tmp_path, partitions=partitions)
    for start in (0, 40, 80):
        crowd(setting, 40, start)
        if die_after is not None:
            dying, _ = setting.distiller(held_out_every=HELD_OUT_EVERY, die_after=die_after, **LIMITS)
            with suppress(Killed):
                run_to_the_end(dying)
    crowd(setting, 5, 120)
    run_to_the_end(setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMITS)[0])
    crowd(setting, 30, 130)
    run_to_the_end(setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMITS)[0])
    assert all(told == passed for told, passed in counted(setting))
    assert setting.manifest().counts["sampled_out"] > 20
    case = case_of(setting)
    assert case.audit().faults == ()
    case.remembered = None
    assert case.audit().faults == ()


def test_a_learner_told_to_stop_while_it_passes_records_has_moved_nothing(pair, tmp_path: Path) -> None:
    setting = Setting(pair, tmp_path)
    setting.emit(*names(4))
    run_to_the_end(setting.distiller()[0])
    setting.emit(*names(60, start=4))
    distillation, journal = setting.distiller(reader=SlowReader(setting.log, "t", 3), **LIMITS)
    distillation.run(lambda: distillation._lag._passing is not None)
    assert not journal.batches
    assert distillation._intake.offsets() == {0: 4}
    run_to_the_end(setting.distiller(**LIMITS)[0])
    assert setting.manifest().counts["sampled_out"] == 52


@pytest.fixture
def lagged(pair, tmp_path: Path):
    """A log of which a sample was learned."""
    setting = Setting(pair, tmp_path, partitions=2)
    crowd(setting, 60)
    run_to_the_end(setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMITS)[0])
    case = case_of(setting)
    assert case.kinds() == CLEAN
    return case


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({"learned": -1, "sampled_out": 1}, 1),
        ({"learned": -3, "sampled_out": 3}, 3),
        ({"sampled_out": -2}, 2),
        ({"unknown_schema": -1}, 1),
    ],
    ids=str,
)
def test_a_loss_cannot_hide_among_records_that_were_passed_over(lagged, changed, lost) -> None:
    manifest = lagged.versions[-1].manifest
    told = {"learned": manifest.num_records, **manifest.counts}
    told |= {name: told[name] + number for name, number in changed.items()}
    lagged.retell(-1, num_records=told.pop("learned"), counts=told)
    assert lagged.kinds()["lost"] == lost


def test_passing_over_without_a_sample_that_says_so_is_a_loss(lagged) -> None:
    for place in range(len(lagged.versions)):
        lagged.retell(place, lag_samples=())
    assert lagged.kinds()["lost"] > 40


def test_where_retention_took_a_part_of_the_sample_counts_alone_are_compared(lagged) -> None:
    lagged.execute("DELETE FROM messages WHERE topic = 't' AND partition = 0 AND offset < 2")
    report = lagged.audit()
    assert report.faults == ()
    assert sum(each.fates.get("undecided", 0) for each in report.partitions) > 40
    manifest = lagged.versions[-1].manifest
    lagged.retell(-1, counts=manifest.counts | {"sampled_out": manifest.counts["sampled_out"] - 1})
    assert lagged.kinds()["lost"] == 1


def test_records_that_were_passed_may_come_again_and_are_learned(pair, tmp_path: Path) -> None:
    setting = Setting(pair, tmp_path)
    setting.emit(*names(30))
    run_to_the_end(setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMITS)[0])
    setting.emit(*names(4))  # redriven, say
    again, journal = setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMITS)
    run_to_the_end(again)
    assert [name for batch in journal.batches for name in batch] == names(4)
    assert case_of(setting).kinds() == CLEAN
