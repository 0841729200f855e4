"""A learner that lags: which records it still learns, that all others are counted, and that the audit can decide."""

from collections.abc import Iterator
from contextlib import suppress
from math import sqrt
from pathlib import Path

import pytest
import torch

from omnidraft.distill.control import TrainingControl
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.catch_up import CatchUp
from omnidraft.distill.ingest.record_disposition import is_held_out, is_sampled_out
from omnidraft.distill.ingest.trace_consumer import PolledRecords, TraceConsumer
from omnidraft.ports import Announcement, Outgoing
from omnidraft.snapshots.manifest import SampledRange
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.audit_case import CLEAN, HELD_OUT_EVERY, case_of
from tests.distiller_runs import Killed, Setting, learned, names, run_until_idle
from tests.trace_records import make_record

LIMITS = {"max_lag_records": 12, "lag_sample_records": 8}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnidraft.distill.ingest.catch_up.CHECK_S", 0.0)


def run_to_the_end(distillation) -> None:
    """Passing records, three a poll, is not idling."""
    run_until_idle(distillation, 120)


def selected(num: int, share: float, prefix: str = "request") -> list:
    records = (make_record(f"{prefix}-{number}", num_emitted=1, num_kept=1) for number in range(num))
    return [record for record in records if not is_sampled_out(record, share)]


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_the_share_of_requests_is_learned_of_every_tenant_and_held_out_among_them_as_ever(share: float) -> None:
    """2,000 requests of each tenant. A binomial count is within 5 standard deviations with odds of a million to one;
    ids are fixed."""
    num, every = 2000, 4
    for tenant in ("large", "small", "old", "new"):
        chosen = selected(num, share, tenant)
        assert abs(len(chosen) - num * share) < 5 * sqrt(num * share * (1 - share))
        num_held_out = sum(is_held_out(record, every) for record in chosen)
        expected = len(chosen) / every
        assert abs(num_held_out - expected) < 5 * sqrt(expected)


def test_all_segments_of_a_request_go_together_and_a_larger_share_contains_a_smaller_one() -> None:
    few, many = ({record.request_id for record in selected(500, share)} for share in (0.1, 0.3))
    assert few < many
    for name in names(50):
        assert len({is_sampled_out(make_record(name, segment=segment), 0.5) for segment in range(4)}) == 1


@pytest.mark.parametrize("poll_size", [1, 7, 50])
def test_what_is_learned_and_counted_does_not_depend_on_the_sizes_of_polls(poll_size: int) -> None:
    records = [(number % 2, number // 2, make_record(f"r{number}")) for number in range(200)]
    sampled = SampledRange(start={0: 10}, end={0: 60, 1: 40}, share=0.3)
    expected = [each for each in records if not (sampled.holds(*each[:2]) and is_sampled_out(each[2], 0.3))]
    metrics, reader = CountingMetrics(), MemoryReader(MemoryLog(2), "t")
    consumer = TraceConsumer(reader, MemoryWriter(MemoryLog(1), "dead"), None, metrics, topic="t")
    batcher = Batcher([0, 1], records_per_step=1, held_out_every=0, held_out_records=1)
    catch_up = CatchUp(consumer, batcher, metrics, max_records=1, sample_records=1)
    catch_up.resume((sampled,))
    positions, num_skipped = [], 0
    for first in range(0, len(records), poll_size):
        polled = tuple(records[first : first + poll_size])
        next_offsets = {partition: offset + 1 for partition, offset, _ in polled}
        batcher.add(catch_up.filter(PolledRecords(polled, next_offsets)))
        while batch := batcher.take(is_drained=first + poll_size >= len(records)):
            positions += batch.positions
        num_skipped += batcher.take_skipped()["sampled_out"]
    assert sorted(positions) == sorted(each[:2] for each in expected)
    assert num_skipped == metrics.value("omnidraft_traces_skipped_total", reason="sampled_out") == 200 - len(expected)
    assert batcher.offsets() == {0: 100, 1: 100}


def crowd(setting: Setting, num: int, start: int = 0) -> None:
    """Records of two tenants, three of four of the first, with others' and broken messages between."""
    for number, name in enumerate(names(num, start=start), start):
        tenant = "small" if number % 4 == 0 else "large"
        setting.emit(name, tenant=tenant)
        if number % 5 == 0:
            setting.emit(f"theirs-{number}", target="another")
        if number % 7 == 0:
            MemoryWriter(setting.log, "t").append([Outgoing(name.encode(), b"junk")])
            setting.emit(name, tenant=tenant)


def counted(setting: Setting) -> Iterator[tuple[int, int]]:
    """Yield the number of records that each snapshot accounts for, and the sum of its offsets."""
    for version in setting.registry.versions():
        manifest = version.manifest
        apart = ("held_out", "duplicate", "sampled_out", "other_pair", "unknown_schema")
        num_skipped = sum(manifest.counts.get(name, 0) for name in apart)
        yield manifest.num_records + num_skipped, sum(manifest.offsets.values())


def ranges(setting: Setting) -> list[SampledRange]:
    """Return every range in the manifests, oldest first."""
    begun: list[SampledRange] = []
    for version in setting.registry.versions():
        begun += [each for each in version.manifest.lag_samples if each not in begun]
    return begun


def test_a_backlog_after_an_outage_is_learned_at_the_rate_that_its_first_snapshot_records(
    pair, tmp_path: Path, caplog
) -> None:
    setting = Setting(pair, tmp_path, partitions=2)
    setting.emit(*names(4))
    run_to_the_end(setting.distiller(**LIMITS)[0])
    setting.emit(*names(96, start=4))  # while nobody learns
    metrics = CountingMetrics()
    distillation, journal = setting.distiller(metrics=metrics, **LIMITS)
    run_to_the_end(distillation)
    (begun,) = ranges(setting)
    num_in_range = sum(begun.end.values()) - sum(begun.start.values())
    assert begun.share == 8 / num_in_range
    in_order = [name for name in learned(journal) if not is_sampled_out(make_record(name), begun.share)]
    assert len(in_order) <= len(learned(journal)) <= len(in_order) + 12  # those of the first snapshot
    manifest = setting.manifest()
    assert manifest.num_records + manifest.counts["sampled_out"] == sum(manifest.offsets.values()) > 90
    assert [record.getMessage() for record in caplog.records if "learning lags" in record.getMessage()]
    assert metrics.value("omnidraft_traces_skipped_total", reason="sampled_out") >= manifest.counts["sampled_out"] > 60
    # what comes after the range is learned whole again
    setting.emit(*names(10, start=100))
    again, after = setting.distiller(**LIMITS)
    run_to_the_end(again)
    assert set(names(10, start=100)) <= set(learned(journal, after))


def test_without_a_limit_or_below_it_every_record_is_learned(pair, tmp_path: Path) -> None:
    for number, limit in enumerate((None, 0, 40)):
        setting = Setting(pair, tmp_path / str(number))
        setting.emit(*names(40))
        distillation, journal = setting.distiller(max_lag_records=limit, lag_sample_records=8)
        run_to_the_end(distillation)
        assert learned(journal) == names(40)
        assert setting.manifest().lag_samples == ()


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("die_after", [1, 3, 4, 6])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_while_it_catches_up(
    pair, tmp_path: Path, partitions: int, die_after: int
) -> None:
    """More messages come between the death and the resumption: the range that was begun does not change."""
    whole, broken = (Setting(pair, tmp_path / name, partitions=partitions) for name in ("whole", "broken"))
    limits = {"max_lag_records": 12, "lag_sample_records": 20, "held_out_every": HELD_OUT_EVERY}
    for setting in (whole, broken):
        crowd(setting, 60)
        with suppress(Killed):  # both have their first range now
            run_to_the_end(setting.distiller(die_after=2, **limits)[0])
        crowd(setting, 20, 60)
    run_to_the_end(whole.distiller(**limits)[0])
    with suppress(Killed):
        run_to_the_end(broken.distiller(die_after=die_after, **limits)[0])
    run_to_the_end(broken.distiller(**limits)[0])
    left, right = whole.masters(), broken.masters()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert ranges(whole) == ranges(broken) != []
    same = ("offsets", "num_records", "num_steps", "counts", "lag_samples", "agreement_after")
    assert [getattr(whole.manifest(), name) for name in same] == [getattr(broken.manifest(), name) for name in same]


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("die_after", [None, 1, 2, 3])
def test_counts_are_the_offsets_and_the_audit_is_clean_whenever_the_learner_died(
    pair, tmp_path: Path, partitions: int, die_after: int | None
) -> None:
    """Several deaths, each inside a range, and more records while it is learned."""
    setting = Setting(pair, tmp_path, partitions=partitions)
    for start in (0, 40, 80):
        crowd(setting, 40, start)
        if die_after is not None:
            dying, _ = setting.distiller(held_out_every=HELD_OUT_EVERY, die_after=die_after, **LIMITS)
            with suppress(Killed):
                run_to_the_end(dying)
    for start, num in ((120, 5), (130, 30)):
        crowd(setting, num, start)
        run_to_the_end(setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMITS)[0])
    assert all(num_counted == num_passed for num_counted, num_passed in counted(setting))
    assert setting.manifest().counts["sampled_out"] > 20
    case = case_of(setting)
    assert case.audit().faults == ()
    case.seen_keys = None
    assert case.audit().faults == ()


class Ordering:
    """A control log with one order to restart at the end of the trace log."""

    def poll(self, timeout_s: float) -> list[Announcement]:
        return [Announcement(0, "restart", start="latest", restart_id="one")]

    poll_all = poll


def test_a_restart_by_an_operator_ends_the_range(pair, tmp_path: Path) -> None:
    setting = Setting(pair, tmp_path)
    setting.emit(*names(60))
    with suppress(Killed):
        run_to_the_end(setting.distiller(die_after=2, **LIMITS)[0])
    assert setting.manifest().lag_samples
    restarted, journal = setting.distiller(control=TrainingControl(Ordering()), **LIMITS)
    run_to_the_end(restarted)
    assert (setting.manifest().offsets, setting.manifest().lag_samples, journal.batches) == ({0: 60}, (), [])
    assert case_of(setting).kinds() == CLEAN


@pytest.fixture
def lagged(pair, tmp_path: Path):
    """A log of which a share was learned."""
    setting = Setting(pair, tmp_path, partitions=2)
    crowd(setting, 60)
    limits = {"max_lag_records": 12, "lag_sample_records": 30}
    run_to_the_end(setting.distiller(held_out_every=HELD_OUT_EVERY, **limits)[0])
    case = case_of(setting)
    assert case.kinds() == CLEAN
    assert case.versions[-1].manifest.counts["sampled_out"] > 20
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
def test_a_loss_cannot_hide_among_records_that_were_sampled_out(lagged, changed, lost) -> None:
    manifest = lagged.versions[-1].manifest
    counts = {"learned": manifest.num_records, **manifest.counts}
    counts |= {name: counts[name] + number for name, number in changed.items()}
    lagged.retell(-1, num_records=counts.pop("learned"), counts=counts)
    assert lagged.kinds()["lost"] == lost


def test_leaving_records_out_without_a_range_that_says_so_is_a_loss(lagged) -> None:
    for place in range(len(lagged.versions)):
        lagged.retell(place, lag_samples=())
    assert lagged.kinds()["lost"] > 20


def test_what_retention_deleted_is_no_fault_and_the_rest_of_the_range_is_still_decided(lagged) -> None:
    lagged.execute("DELETE FROM messages WHERE topic = 't' AND partition = 0 AND offset < 2")
    report = lagged.audit()
    assert report.faults == ()
    assert sum(each.fates.get("sampled_out", 0) for each in report.partitions) > 20


def test_records_that_were_sampled_out_may_come_again_and_are_learned(pair, tmp_path: Path) -> None:
    setting = Setting(pair, tmp_path)
    setting.emit(*names(60))
    first, journal = setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMITS)
    run_to_the_end(first)
    out = [name for name in names(60) if name not in learned(journal)]
    out = [name for name in out if not is_held_out(make_record(name), HELD_OUT_EVERY)][:4]
    setting.emit(*out)  # redriven, say
    again, after = setting.distiller(held_out_every=HELD_OUT_EVERY, **LIMITS)
    run_to_the_end(again)
    assert set(out) <= set(learned(after))
    assert case_of(setting).kinds() == CLEAN
