"""The distiller over a log in memory and a registry of folders: each record once, whatever happens."""

import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omnidraft.distill.control import TrainingControl
from omnidraft.distill.ingest import batcher
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.distill.ingest.trace_consumer import PolledRecords
from omnidraft.errors import BusError, ConfigError, RegistryError
from omnidraft.ports import Drift, Outgoing, Pause, PollResult
from omnidraft.snapshots import bundle
from omnidraft.testing.memory_log import MemoryLog, MemoryWriter
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from omnidraft.traces.schema import MAX_PAYLOAD_BYTES
from tests.audit_case import CLEAN, HELD_OUT_EVERY, case_of
from tests.control_logs import Orders
from tests.distiller_runs import Killed, Setting, SlowReader, learned, names, run_until_idle, until_idle
from tests.trace_records import make_record


class GrowingReader(SlowReader):
    """Reads a topic that gets its last partition after so many polls."""

    def __init__(self, log: MemoryLog, topic: str, after: int) -> None:
        super().__init__(log, topic, 3)
        self._all, self._after = self._partitions, after
        self._grow()

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        self._after -= 1
        self._grow()
        return super().poll(max_messages, timeout_s)

    def _grow(self) -> None:
        self._partitions = self._all if self._after <= 0 else self._all[:-1]
        self._positions.setdefault(len(self._partitions) - 1, 0)


@pytest.fixture
def setting(pair, tmp_path: Path) -> Setting:
    return Setting(pair, tmp_path)


def test_the_base_drafter_is_published_first_and_after_every_so_many_steps_a_snapshot_that_says_what_it_learned(
    setting,
) -> None:
    setting.emit(*names(8))
    distillation, _ = setting.distiller()
    run_until_idle(distillation)
    assert [version.version for version in setting.registry.versions()] == [1, 2, 3]
    manifest = setting.manifest()
    assert (manifest.num_steps, manifest.num_records, manifest.offsets) == (4, 8, {0: 8})
    assert manifest.parent_id == setting.manifest("2").snapshot_id
    assert set(manifest.losses) == {"dm", "ngram"}
    assert distillation.status().version == 3
    first = setting.manifest("1")
    assert (first.train, first.offsets, first.parent_id) == ("base", {}, None)
    assert bundle.DRAFTER not in first.sha256


def test_what_does_not_fill_a_batch_is_left_for_later(setting) -> None:
    setting.emit(*names(5))
    distillation, journal = setting.distiller()
    run_until_idle(distillation)
    assert setting.manifest().offsets == {0: 4}
    setting.emit("request-005")
    again, after = setting.distiller()
    run_until_idle(again)
    assert learned(journal, after) == names(6)
    assert setting.manifest().offsets == {0: 6}


def test_batches_do_not_depend_on_how_polls_fell(pair, tmp_path) -> None:
    """They do not while every partition has records waiting; here all are written before the first poll."""
    runs = []
    for most in (1, 2, 3):
        setting = Setting(pair, tmp_path / str(most), partitions=3)
        setting.emit(*names(18))
        distillation, journal = setting.distiller(reader=SlowReader(setting.log, "t", most))
        run_until_idle(distillation)
        runs.append((journal.batches, {name: tensor.clone() for name, tensor in setting.masters().items()}))
    assert len(runs[0][0]) == 9
    for batches, masters in runs[1:]:
        assert batches == runs[0][0]
        assert all(torch.equal(masters[name], runs[0][1][name]) for name in masters)


@pytest.mark.parametrize(("partitions", "die_after"), [(1, 0), (3, 5)])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(pair, tmp_path, partitions, die_after) -> None:
    whole, broken = (Setting(pair, tmp_path / name, partitions=partitions) for name in ("whole", "broken"))
    for setting in (whole, broken):
        setting.emit(*names(17))
        setting.emit("request-003", "request-016")  # repeated by the recorder
    one, journal = whole.distiller(held_out_every=4)
    run_until_idle(one)
    dying, _ = broken.distiller(held_out_every=4, die_after=die_after)
    with pytest.raises(Killed):
        run_until_idle(dying)
    resumed, again = broken.distiller(held_out_every=4)
    run_until_idle(resumed)
    assert again.batches == journal.batches[-len(again.batches) :] != []
    left, right = whole.masters(), broken.masters()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    same = ("offsets", "num_records", "num_steps", "counts", "agreement_after", "held_out_records")
    assert [getattr(whole.manifest(), name) for name in same] == [getattr(broken.manifest(), name) for name in same]


def test_a_partition_that_is_added_changes_no_batch_of_a_killed_and_resumed_run(pair, tmp_path) -> None:
    """It is added after the snapshot that the run resumes from; the resumed one sees it from its first poll on."""
    whole, broken = (Setting(pair, tmp_path / name, partitions=3) for name in ("whole", "broken"))
    for setting in (whole, broken):
        setting.emit(*names(48))
    options = {"steps_per_snapshot": 4}
    one, learned_whole = whole.distiller(reader=GrowingReader(whole.log, "t", 5), **options)
    run_until_idle(one)
    dying, before = broken.distiller(reader=GrowingReader(broken.log, "t", 5), die_after=6, **options)
    with pytest.raises(Killed):
        run_until_idle(dying)
    resumed, after = broken.distiller(reader=GrowingReader(broken.log, "t", 0), **options)
    run_until_idle(resumed)
    assert before.batches[:4] + after.batches == learned_whole.batches
    assert sorted(learned(learned_whole)) == names(48)
    assert all(torch.equal(tensor, broken.masters()[name]) for name, tensor in whole.masters().items())


@pytest.mark.parametrize("die_after", [None, 2])
def test_what_is_skipped_is_counted_once_so_that_all_counts_together_are_the_offsets(pair, tmp_path, die_after) -> None:
    """Records of another pair and broken ones between ours, two partitions, a death in between."""
    setting = Setting(pair, tmp_path, partitions=2)
    for number, name in enumerate(names(20)):
        setting.emit(name)
        setting.emit(f"theirs-{number}", target="another")
        if number % 4 == 0:
            MemoryWriter(setting.log, "t").append([Outgoing(name.encode(), b"junk")])
        if number == 3:
            setting.emit("request-001")
    if die_after is not None:
        dying, _ = setting.distiller(held_out_every=5, die_after=die_after)
        with pytest.raises(Killed):
            run_until_idle(dying)
    for _ in range(2):
        distillation, journal = setting.distiller(held_out_every=5)
        run_until_idle(distillation)
    assert not any(name.startswith("theirs") for name in learned(journal))
    manifest = setting.manifest()
    apart = {name: manifest.counts[name] for name in ("held_out", "duplicate", "other_pair", "unknown_schema")}
    assert all(apart.values())
    assert manifest.num_records + sum(apart.values()) == sum(manifest.offsets.values())
    assert len(setting.log.topic("dead")[0]) + len(setting.log.topic("dead")[1]) >= apart["unknown_schema"]


def test_every_record_is_learned_once_across_many_deaths(pair, tmp_path) -> None:
    """Steps between the newest snapshot and a death are lost with it, and done again."""
    setting = Setting(pair, tmp_path, partitions=2)
    setting.emit(*names(20))
    kept: Counter[str] = Counter()
    for _ in range(10):
        distillation, journal = setting.distiller(die_after=3)
        steps_before = setting.manifest().num_steps if setting.registry.versions() else 0
        with suppress(Killed):
            run_until_idle(distillation)
        kept.update(name for batch in journal.batches[: setting.manifest().num_steps - steps_before] for name in batch)
    assert kept == Counter(names(20))
    assert setting.manifest().num_records == 20


def test_held_out_records_are_never_learned_and_survive_a_restart(setting) -> None:
    setting.emit(*names(24))
    distillation, journal = setting.distiller(held_out_every=3)
    run_until_idle(distillation)
    manifest = setting.manifest()
    num_held_out = manifest.counts["held_out"]
    assert num_held_out > 2
    assert len(set(learned(journal))) == manifest.num_records == len(learned(journal))
    assert manifest.held_out_records == min(4, num_held_out)
    assert None not in (manifest.agreement_before, manifest.agreement_after)
    setting.emit(*names(24, start=24))
    again, after = setting.distiller(held_out_every=3)
    run_until_idle(again)
    assert setting.manifest().held_out_records == 4
    assert setting.manifest().counts["held_out"] > num_held_out
    assert not set(learned(journal)) & set(learned(after))


def largest_that_is_read(record: TraceRecord) -> Outgoing:
    """The record in a message as large as is read."""

    def value(worker: str) -> bytes:
        return codec.encode(replace(record, worker=worker), max_bytes=None)

    largest = value("w" * (MAX_PAYLOAD_BYTES - len(value("")) - 2))  # the length of the name takes two bytes more
    assert len(largest) == MAX_PAYLOAD_BYTES
    return Outgoing(codec.key(record), largest, codec.headers(record))


def test_a_held_out_record_larger_than_any_that_is_written_is_published_and_resumed(setting) -> None:
    held_out = [name for name in names(24) if is_held_out(setting.record(name), 3)]
    MemoryWriter(setting.log, "t").append([largest_that_is_read(setting.record(held_out[0]))])
    setting.emit(*[name for name in names(24) if name not in held_out][:4])
    run_until_idle(setting.distiller(held_out_every=3)[0])
    assert setting.manifest().held_out_records == 1
    resumed, _ = setting.distiller(held_out_every=3)
    run_until_idle(resumed)
    assert [record.request_id for record in resumed.ingest.batcher.held_out] == held_out[:1]


def test_segments_of_one_request_are_held_out_together(setting) -> None:
    for name in names(12):
        for segment in range(3):
            setting.emit(name, segment=segment)
    distillation, journal = setting.distiller(held_out_every=2)
    run_until_idle(distillation)
    times = Counter(learned(journal))
    assert 0 < len(times) < 12
    whole = [name for name in times if times[name] == 3]
    assert len(whole) >= len(times) - 1  # the last one may wait for its batch


def test_agreement_before_is_the_parents_on_the_same_records(setting) -> None:
    is_judge = {name: is_held_out(setting.record(name), 3) for name in names(40)}
    setting.emit(*[name for name in names(40) if is_judge[name]][:4])
    setting.emit(*[name for name in names(40) if not is_judge[name]][:12])
    run_until_idle(setting.distiller(held_out_every=3)[0])
    measured = [version.manifest for version in setting.registry.versions() if version.manifest.num_records]
    assert [each.held_out_records for each in measured] == [4, 4, 4]
    assert [each.agreement_before for each in measured[1:]] == [each.agreement_after for each in measured[:-1]]


def test_duplicates_are_dropped_and_counted_also_across_a_restart(setting) -> None:
    setting.emit(*names(4), *names(2), *names(2, start=4))
    distillation, journal = setting.distiller()
    run_until_idle(distillation)
    setting.emit(*names(6), *names(2, start=6))
    again, after = setting.distiller()
    run_until_idle(again)
    assert learned(journal, after) == names(8)
    assert setting.manifest().counts["duplicate"] == 8


def test_what_a_worker_repeats_after_an_outage_of_its_own_is_learned_once() -> None:
    """Before it got the acknowledgement it was cut off, and thousands of records of the others lie in between."""
    record = make_record()
    numbers = (*range(5_000), *range(4), *range(5_000, 5_008))
    records = ((0, at, replace(record, request_id=f"r{number}")) for at, number in enumerate(numbers))
    taking = batcher.Batcher([0], records_per_step=8, held_out_every=0, held_out_records=1)
    taking.add(PolledRecords(tuple(records), {0: len(numbers)}))
    batches = list(iter(lambda: taking.take(is_drained=False), None))
    assert sum(batch.num_duplicates for batch in batches) == 4
    assert sum(len(batch.records) for batch in batches) == 5_008


@pytest.fixture
def small_buffers(monkeypatch) -> None:
    monkeypatch.setattr(batcher, "LOOKAHEAD", 24)


def emit_repeatedly(setting) -> None:
    """Ten records as a producer writes them that gets no answer and sends them again and again; then 20 others."""
    for _ in range(12):
        setting.emit(*names(10))
    setting.emit(*names(20, start=10))


def test_more_duplicates_than_a_buffer_holds_stop_no_learner(pair, tmp_path, small_buffers) -> None:
    setting = Setting(pair, tmp_path, partitions=3)
    emit_repeatedly(setting)
    distillation, journal = setting.distiller(held_out_every=4, limits={"records_per_step": 3})
    run_until_idle(distillation, 60)
    manifest = setting.manifest()
    num = sum(not is_held_out(setting.record(name), 4) for name in names(30))
    assert len(learned(journal)) == len(set(learned(journal))) == manifest.num_records == num - num % 3
    skipped = manifest.counts["held_out"] + manifest.counts["duplicate"]
    assert manifest.num_records + skipped == sum(manifest.offsets.values()) > 120


def test_a_killed_and_resumed_run_goes_through_the_same_duplicates(pair, tmp_path, small_buffers) -> None:
    whole, broken = (Setting(pair, tmp_path / name) for name in ("whole", "broken"))
    options = {"held_out_every": 4, "limits": {"records_per_step": 3}}
    for setting in (whole, broken):
        emit_repeatedly(setting)
    one, journal = whole.distiller(**options)
    run_until_idle(one, 60)
    dying, _ = broken.distiller(die_after=2, **options)
    with pytest.raises(Killed):
        run_until_idle(dying, 60)
    resumed, again = broken.distiller(reader=SlowReader(broken.log, "t", 2), **options)
    run_until_idle(resumed, 60)
    assert again.batches == journal.batches[-len(again.batches) :] != []
    left, right = whole.masters(), broken.masters()
    assert all(torch.equal(left[name], right[name]) for name in left)
    same = ("offsets", "num_records", "num_steps", "counts", "agreement_after", "held_out_records")
    assert [getattr(whole.manifest(), name) for name in same] == [getattr(broken.manifest(), name) for name in same]


def test_records_that_are_all_held_out_make_no_step(setting, small_buffers) -> None:
    setting.emit(*names(60))
    distillation, journal = setting.distiller(held_out_every=1)
    run_until_idle(distillation, 60)
    status = distillation.status()
    assert (journal.batches, status.num_steps, len(distillation.ingest.batcher.held_out)) == ([], 0, 4)
    assert distillation.ingest.batcher.offsets() == {0: 48}


def test_an_idle_partition_holds_nobody_up(pair, tmp_path) -> None:
    setting = Setting(pair, tmp_path, partitions=3)
    setting.emit(*["same-request"] * 1, *[])
    for segment in range(1, 6):
        setting.emit("same-request", segment=segment)
    distillation, journal = setting.distiller()
    run_until_idle(distillation)
    assert learned(journal) == ["same-request"] * 6


def test_after_its_parent_was_deleted_a_distiller_goes_on_and_loses_nothing(setting, caplog) -> None:
    """An operator deleted the champion in MLflow, say, and no other distiller learns."""
    wanted = [name for name in names(40) if not is_held_out(setting.record(name), HELD_OUT_EVERY)][:8]
    setting.emit(*wanted)
    distillation, journal = setting.distiller(held_out_every=HELD_OUT_EVERY)
    idle, deleted = until_idle(25)(distillation), []

    def stop() -> bool:
        if distillation.status().version == 2 and not deleted:
            (folder,) = setting.folder.glob("registry/**/v000002")
            deleted.append(setting.manifest())
            shutil.rmtree(folder)
        return idle()

    distillation.run(stop)
    assert learned(journal) == wanted
    newest, first = setting.manifest(), setting.manifest("1")
    assert (newest.num_records, newest.offsets) == (8, {0: 8})
    assert (newest.parent_id, newest.continues_id) == (deleted[0].snapshot_id, first.snapshot_id)
    assert "snapshot 2 is deleted in the registry; learning goes on from what it learned" in caplog.text
    assert case_of(setting).kinds() == CLEAN


class Flaky:
    """A registry, or a log's reader, that fails at the first of every three calls."""

    def __init__(self, inner: object, error: Exception, methods: tuple[str, ...]) -> None:
        self._inner, self._error, self._methods = inner, error, methods
        self._num_calls = 0

    def __getattr__(self, name: str):
        attribute = getattr(self._inner, name)
        return self._sometimes(attribute) if name in self._methods else attribute

    def _sometimes(self, method):
        def call(*args, **kwargs):
            self._num_calls += 1
            if self._num_calls % 3 == 1:
                raise self._error
            return method(*args, **kwargs)

        return call


def test_a_log_or_registry_that_is_away_for_a_while_costs_nothing(setting) -> None:
    setting.emit(*names(8))
    registry = Flaky(setting.registry, RegistryError("away"), ("resolve", "publish"))
    reader = Flaky(SlowReader(setting.log, "t", 3), BusError("away"), ("poll",))
    distillation, journal = setting.distiller(registry=registry, reader=reader)
    run_until_idle(distillation)
    assert learned(journal) == names(8)
    assert [version.version for version in setting.registry.versions()] == [1, 2, 3]


DRIFT = ("drift", "t", "text")


def test_while_traffic_drifts_snapshots_come_more_often_and_the_weights_are_the_same(
    setting, tmp_path, pair, monkeypatch
) -> None:
    monkeypatch.setattr("omnidraft.distill.distiller.DRIFT_HASTE", 2)
    setting.emit(*names(12))
    calm = Setting(pair, tmp_path / "calm")
    calm.log = setting.log
    noted = []
    hasty, _ = setting.distiller(
        control=TrainingControl(Orders((0, DRIFT, Drift(level=0.7)), (60, DRIFT, None), down=(1, 2))),
        compare_earlier=noted.append,
    )
    run_until_idle(hasty)
    run_until_idle(calm.distiller()[0])
    assert noted == ["t"]
    assert [len(each.registry.versions()) for each in (setting, calm)] == [7, 4]
    fast, slow = setting.masters(), calm.masters()
    assert all(torch.equal(fast[name], slow[name]) for name in slow)


def test_while_paused_nothing_is_learned(setting) -> None:
    setting.emit(*names(4))
    orders = Orders((0, ("pause",), Pause()), (10, ("pause",), None))
    distillation, journal = setting.distiller(control=TrainingControl(orders))
    seen = []
    inner = until_idle(40)(distillation)

    def stop() -> bool:
        seen.append((distillation.status().is_paused, distillation.status().num_steps))
        return inner()

    distillation.run(stop)
    assert (True, 0) in seen
    assert all(num_steps == 0 for is_paused, num_steps in seen if is_paused)
    assert learned(journal) == names(4)


def test_stopping_publishes_what_was_learned_since(setting) -> None:
    setting.emit(*names(2))
    distillation, _ = setting.distiller(steps_per_snapshot=100)
    distillation.run(lambda: distillation.status().num_steps == 1)
    assert setting.manifest().num_records == 2
    assert setting.registry.resolve("latest").version == 2


def test_another_base_drafter_is_refused(setting) -> None:
    run_until_idle(setting.distiller()[0])
    distillation, _ = setting.distiller(drafter_hash="other")
    with pytest.raises(ConfigError, match="drafter_hash"):
        run_until_idle(distillation)


def test_progress_is_told_after_every_step(setting) -> None:
    setting.emit(*names(4))
    statuses = []
    distillation, _ = setting.distiller(progress=statuses.append)
    run_until_idle(distillation)
    assert [status.num_records for status in statuses if status.losses][:2] == [2, 4]
    assert statuses[-1].version == 2
    assert statuses[-1].offsets == {0: 4}
