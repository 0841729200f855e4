"""The audit over logs that real distillers learned from: it reports every planted fault, and nothing else."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omnidraft.audit.findings import FaultKind
from omnidraft.audit.run import DiscardingWriter, audit
from omnidraft.bus.sqlite_forget import forget_messages
from omnidraft.bus.sqlite_log import SqliteWriter
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.ports import Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryReader, MemoryWriter
from tests.audit_case import CLEAN, HELD_OUT_EVERY, Case, case_of
from tests.distiller_runs import Killed, Setting, names, run_until_idle


def busy(pair, folder: Path, partitions: int) -> Setting:
    """Ours, theirs, repeated and broken messages."""
    setting = Setting(pair, folder, partitions=partitions)
    for number, name in enumerate(names(24)):
        setting.emit(name)
        if number % 3 == 0:
            setting.emit(f"theirs-{number}", target="another")
        if number % 6 == 0:
            MemoryWriter(setting.log, "t").append([Outgoing(name.encode(), b"junk")])
            setting.emit(f"request-{number // 2:03d}")
    return setting


@pytest.fixture(scope="module", params=[1, 3], ids=["one partition", "three partitions"])
def learned(pair, tmp_path_factory: pytest.TempPathFactory, request) -> Case:
    setting = busy(pair, tmp_path_factory.mktemp("learned"), request.param)
    with suppress(Killed):
        run_until_idle(setting.distiller(held_out_every=HELD_OUT_EVERY, die_after=5)[0])
    run_until_idle(setting.distiller(held_out_every=HELD_OUT_EVERY)[0])
    return case_of(setting)


@pytest.fixture
def case(learned: Case, tmp_path: Path) -> Case:
    return learned.copy(tmp_path / "log.db")


def test_a_run_that_was_killed_and_resumed_is_found_clean_and_every_offset_accounted_for(case: Case) -> None:
    report = case.audit()
    assert report.faults == ()
    assert report.num_snapshots >= 4
    manifest = case.versions[-1].manifest
    for each in report.partitions:
        assert sum(each.fates.values()) == each.offset == manifest.offsets[each.partition]
        assert each.end - each.offset == each.num_to_learn
    dispositions = [each.fates for each in report.partitions]
    assert sum(each.get("learned", 0) for each in dispositions) == manifest.num_records
    assert sum(each.get("unknown_schema", 0) for each in dispositions) == manifest.counts["unknown_schema"] > 0
    assert sum(each.get("duplicate", 0) for each in dispositions) == manifest.counts["duplicate"] > 0


def test_a_message_that_the_log_lost_is_told(case: Case) -> None:
    case.execute("DELETE FROM messages WHERE topic = 't' AND partition = 0 AND offset = 3")
    (fault,) = [fault for fault in case.audit().faults if fault.kind is FaultKind.LOST]
    assert (fault.partition, fault.offset, fault.num) == (0, 3, 1)


def test_what_retention_deleted_after_it_was_learned_is_no_fault(case: Case) -> None:
    case.execute("DELETE FROM messages WHERE topic = 't' AND partition = 0 AND offset < 4")
    report = case.audit()
    assert report.num(FaultKind.LOST) == 0
    assert report.partitions[0].first == 4


def test_what_retention_deleted_before_it_was_learned_is_lost(case: Case) -> None:
    end = case.versions[-1].manifest.offsets[0]
    SqliteWriter(case.path, "t").append([Outgoing(f"later-{number}".encode(), b"") for number in range(27)])
    case.execute(f"DELETE FROM messages WHERE topic = 't' AND partition = 0 AND offset < {end + 2}")
    lost = [fault for fault in case.audit().faults if fault.kind is FaultKind.LOST]
    assert [(fault.partition, fault.offset, fault.num) for fault in lost] == [(0, end, 2)]


def test_a_log_that_ends_before_its_snapshot_has_lost_the_rest(case: Case) -> None:
    end = case.versions[-1].manifest.offsets[0]
    case.execute(f"DELETE FROM messages WHERE topic = 't' AND partition = 0 AND offset >= {end - 2}")
    case.execute(f"UPDATE partitions SET next_offset = {end - 2} WHERE topic = 't' AND partition = 0")
    assert [fault.num for fault in case.audit().faults if fault.offset == end - 2] == [2]


def test_a_missing_dead_letter_is_a_lost_record(case: Case) -> None:
    case.execute("DELETE FROM messages WHERE topic = 'dead' AND offset = 1")
    (fault,) = case.audit().faults
    assert (fault.kind, fault.num) == (FaultKind.LOST, 1)
    assert "dead letter" in fault.what


@pytest.mark.parametrize(
    ("changed", "by", "expected"),
    [
        ({"learned": 1}, 1, {FaultKind.LEARNED_TWICE: 1}),
        ({"learned": -1}, -1, {FaultKind.LOST: 1}),
        ({"held_out": 1}, 1, {FaultKind.MISCOUNTED: 1}),
        ({"unknown_schema": -1}, -1, {FaultKind.LOST: 1}),
        ({"unreadable": 1}, 1, {FaultKind.MISCOUNTED: 1}),
        ({"learned": 1, "duplicate": -1}, 0, {FaultKind.LEARNED_TWICE: 1}),
        ({"learned": -1, "duplicate": 1}, 0, {FaultKind.LOST: 1}),
        ({"learned": -1, "held_out": 1}, 0, {FaultKind.MISCOUNTED: 1}),
    ],
    ids=str,
)
def test_a_count_that_is_off_by_one_is_told_with_its_snapshot(case: Case, changed, by, expected) -> None:
    manifest = case.versions[-1].manifest
    counts = {"learned": manifest.num_records, **manifest.counts}
    counts |= {name: counts.get(name, 0) + number for name, number in changed.items()}
    case.retell(-1, num_records=counts.pop("learned"), counts=counts)
    assert case.kinds() == CLEAN | expected
    assert {fault.version for fault in case.audit().faults} == {case.versions[-1].version}


def test_a_snapshot_that_skipped_an_offset_lost_its_record(case: Case) -> None:
    offsets = case.versions[-1].manifest.offsets
    case.retell(-1, offsets={**offsets, 0: offsets[0] + 1})
    writer = SqliteWriter(case.path, "t", partitions=case.num_partitions)
    writer.append([Outgoing(f"more-{number}".encode(), b"", {"target": b"another"}) for number in range(9)])
    case.seen_keys = None
    assert case.kinds() == CLEAN | {FaultKind.LOST: 1}


def test_a_record_that_went_by_unlearned_is_named_even_where_counts_were_made_to_fit(case: Case) -> None:
    """The newest snapshot does not remember it, and remembers another in its place."""
    learned_late = sorted(case.seen_keys or ())
    for name in learned_late:
        case.seen_keys = frozenset({*learned_late, 12345} - {name})
        kinds = case.kinds()
        assert kinds[FaultKind.MISCOUNTED] == 1
        assert kinds[FaultKind.LOST] <= 1
    # all but the first of each partition are known to be missing
    lost = 0
    for name in learned_late:
        case.seen_keys = frozenset({*learned_late, 12345} - {name})
        lost += case.kinds()[FaultKind.LOST]
    assert lost == len(learned_late) - case.num_partitions


def test_a_record_repeated_too_far_back_is_learned_twice_and_both_places_are_told(pair, tmp_path: Path) -> None:
    setting = Setting(pair, tmp_path)
    setting.emit(*names(10), "request-001")
    run_until_idle(setting.distiller(seen_records=4)[0])
    setting.emit(*names(4, start=20))
    run_until_idle(setting.distiller(seen_records=4)[0])
    case = case_of(setting)
    case.held_out_every, case.seen_records = 0, 4
    (fault,) = case.audit().faults
    assert (fault.kind, fault.num, fault.partition, fault.offset) == (FaultKind.LEARNED_TWICE, 1, 0, 10)
    assert "0:1," in fault.what


class Behind(Batcher):
    """Saves a position one record too early, and forgets what it saw: that record is learned again."""

    def offsets(self) -> dict[int, int]:
        return {partition: max(0, offset - 1) for partition, offset in super().offsets().items()}

    def state(self) -> dict[str, torch.Tensor]:
        return super().state() | {"seen": torch.zeros(0, dtype=torch.int64)}


class Ahead(Batcher):
    """Saves a position one record too late: that record is never learned."""

    def start_at(self, offsets) -> None:
        super().start_at({partition: offset + 1 for partition, offset in offsets.items()})


@pytest.mark.parametrize(("batcher_class", "kind"), [(Behind, FaultKind.LEARNED_TWICE), (Ahead, FaultKind.LOST)])
def test_a_distiller_with_its_position_off_by_one_is_found_out(
    pair, tmp_path: Path, batcher_class: Callable[..., Batcher], kind: FaultKind
) -> None:
    setting = Setting(pair, tmp_path)
    setting.emit(*names(20))
    for die_after in (4, None):
        distillation, _ = setting.distiller(
            held_out_every=HELD_OUT_EVERY, die_after=die_after, batcher_class=batcher_class
        )
        with suppress(Killed):
            run_until_idle(distillation)
    assert case_of(setting).audit().num(kind) >= 1


def test_learning_that_began_anew_is_judged_from_there(pair, tmp_path: Path) -> None:
    """A folder learned elsewhere has counts of its own and no offsets."""
    setting = busy(pair, tmp_path, 1)
    run_until_idle(setting.distiller(held_out_every=HELD_OUT_EVERY)[0])
    case = case_of(setting)
    first = case.versions[0]
    elsewhere = replace(
        first, manifest=first.manifest.model_copy(update={"num_records": 500, "counts": {"held_out": 9}})
    )
    shifted = [
        replace(
            each,
            manifest=each.manifest.model_copy(
                update={
                    "num_records": each.manifest.num_records + 500,
                    "counts": each.manifest.counts | {"held_out": each.manifest.counts.get("held_out", 0) + 9},
                }
            ),
        )
        for each in case.versions[1:]
    ]
    case.versions = [*case.versions, elsewhere, *shifted]
    assert case.kinds() == CLEAN


def test_before_the_first_snapshot_everything_is_still_to_learn(pair, tmp_path: Path) -> None:
    setting = Setting(pair, tmp_path)
    setting.emit(*names(3))
    ends = MemoryReader(setting.log, "t").end_offsets()
    source = TraceConsumer(MemoryReader(setting.log, "t"), DiscardingWriter(), None, CountingMetrics(), topic="t")
    report = audit(source, ends, [], {}, seen_keys=None, held_out_every=0)
    assert (report.version, report.faults, report.plain_data()["num_to_learn"]) == (None, (), 3)


@pytest.mark.parametrize("has_memory", [True, False])
def test_records_that_were_forgotten_after_they_were_learned_are_no_fault_and_are_counted(
    case: Case, has_memory: bool
) -> None:
    if not has_memory:
        case.seen_keys = None
    positions = [(partition, offset) for partition in range(case.num_partitions) for offset in (1, 2, 5)]
    before = {each.partition: each for each in case.audit().partitions}
    forget_messages(case.path, "t", positions, b"mark")
    report = case.audit()
    assert report.faults == ()
    for each in report.partitions:
        assert sum(each.fates.values()) == sum(before[each.partition].fates.values())
    num_forgotten = sum(each.fates.get("forgotten", 0) for each in report.partitions)
    assert 0 < num_forgotten <= len(positions)
