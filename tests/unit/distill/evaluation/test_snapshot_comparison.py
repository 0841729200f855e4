"""When traffic drifts, the snapshot that agrees best with it is found on the tenant's newest records, and told."""

import shutil
from pathlib import Path

import pytest

from omnidraft.audit.run import DiscardingWriter
from omnidraft.distill.evaluation.snapshot_comparison import MOST_SNAPSHOTS, SnapshotComparison, candidates
from omnidraft.distill.ingest.topic_scan import RecentRecords
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.errors import RegistryError
from omnidraft.ports import Outgoing, SnapshotVersion
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.traces import codec
from tests.snapshot_folders import manifest, version_folder
from tests.tiny_pair import TEXTS


class Control:
    """Implements ports.ControlWriter in memory."""

    def __init__(self) -> None:
        self.put_values: list[tuple] = []

    def put(self, key, value, reason=None) -> None:
        assert key[0] == "best"
        self.put_values.append((key[1], value.version, reason))


class Setting:
    """A log, a registry and a learner that learns one text after another."""

    def __init__(self, pair, folder: Path, learned) -> None:
        self.pair, self.folder, self.learned = pair, folder, learned
        self.log = MemoryLog(2)
        self.registry = DirectoryRegistry(folder / "registry", "drafter", "target", keep_resume=2)
        self.learner = pair.learner()
        self.control = Control()
        self.base = self.learner.serving_tensors()

    def publish(self, snapshot_id: str, serving=None, agreement=None, **fields) -> int:
        versions = self.registry.versions()
        told = {"target": "target", "drafter": "drafter", "agreement_after": agreement} | fields
        parts = {bundle.NGRAMS: self.learned[TEXTS[0]][1]} | ({bundle.DRAFTER: serving} if serving else {})
        bundle.write(self.folder / snapshot_id, manifest(snapshot_id, **told), parts)
        return self.registry.publish(self.folder / snapshot_id, versions[-1].version if versions else None).version

    def learn(self, text: str):
        return self.learned[text][0]

    def emit(self, text: str, number: int, tenant: str, first: int = 0) -> None:
        for count in range(first, first + number):
            record = self.pair.record(f"{tenant}-{count}", text, tenant=tenant)
            message = Outgoing(codec.key(record), codec.encode(record), codec.headers(record))
            MemoryWriter(self.log, "t").append([message])

    def earlier(self, registry=None, num_records=8) -> SnapshotComparison:
        fingerprint, pair = self.pair.alignment.fingerprint, {"target": "target", "drafter": "drafter"}

        def source_over(reader) -> TraceConsumer:
            return TraceConsumer(reader, DiscardingWriter(), fingerprint, CountingMetrics(), topic="t", **pair)

        recent = RecentRecords(lambda: MemoryReader(self.log, "t"), source_over, num_records)

        return SnapshotComparison(
            registry or self.registry, self.learner, recent, self.control, lambda: self.base, self.folder / "f"
        )


@pytest.fixture(scope="module")
def learned(pair):
    """Weights and n-gram cache of a learner for each text."""
    made = {}
    for text in TEXTS[:2]:
        learner = pair.learner()
        for number in range(30):
            learner.step([pair.record(f"{number}-{text[:4]}", text)])
        weights = {name: tensor.clone() for name, tensor in learner.serving_tensors().items()}
        made[text] = weights, learner.cache.to_arrays()
    return made


@pytest.fixture
def setting(pair, tmp_path: Path, learned) -> Setting:
    """Version 1 is the base drafter, 2 knows the first text, 3 the second and is the champion."""
    made = Setting(pair, tmp_path, learned)
    made.publish("base")
    made.publish("first", made.learn(TEXTS[0]))
    made.registry.promote(made.publish("second", made.learn(TEXTS[1])))
    return made


def test_the_snapshot_that_knows_the_new_traffic_is_told_with_all_figures(setting: Setting) -> None:
    setting.emit(TEXTS[1], 20, "t")
    setting.emit(TEXTS[0], 10, "t", first=20)
    setting.emit(TEXTS[1], 10, "other")
    before = setting.learner.serving_tensors()
    setting.earlier().compare("t")
    ((tenant, version, reason),) = setting.control.put_values
    assert (tenant, version) == ("t", 2)
    assert "the 8 newest records of t, by version: 3: 0." in reason
    assert all((before[name] == tensor).all() for name, tensor in setting.learner.serving_tensors().items())
    assert [path for path in (setting.folder / "f").iterdir() if path.is_dir()] == []


def test_a_snapshot_of_another_shape_is_left_out_and_nothing_is_told_where_it_is_the_champion(
    setting: Setting, caplog
) -> None:
    setting.emit(TEXTS[0], 10, "t")
    odd = setting.publish("odd", {name: tensor[:1].clone() for name, tensor in setting.base.items()})
    setting.earlier().compare("t")
    ((tenant, version, reason),) = setting.control.put_values
    assert (tenant, version, f"{odd}: " in reason) == ("t", 2, False)
    assert f"snapshot {odd} is not compared" in caplog.text
    setting.registry.promote(odd)
    setting.earlier().compare("t")
    assert len(setting.control.put_values) == 1


def test_a_snapshot_that_may_have_learned_the_new_traffic_is_no_earlier_one(setting: Setting) -> None:
    """It would agree best with what it has learned. The champion is compared whenever it was made."""
    setting.emit(TEXTS[0], 10, "t")
    learned = MemoryReader(setting.log, "t").end_offsets()
    newest = setting.publish("newest", setting.learn(TEXTS[0]), agreement=0.9, offsets=learned)
    setting.earlier().compare("t")
    ((_, version, reason),) = setting.control.put_values
    assert (version, f"{newest}: " in reason) == (2, False)


def test_offsets_tell_which_snapshots_may_have_learned_the_records_and_those_of_another_log_tell_nothing() -> None:
    made = {
        1: {"offsets": {0: 8}, "log_id": "log"},
        2: {"offsets": {0: 9}, "log_id": "log"},
        3: {"offsets": {0: 8, 1: 4}, "log_id": "log"},
        4: {"offsets": {0: 9}},
        5: {"offsets": {0: 90}, "log_id": "another"},
        6: {"offsets": {0: 90}, "log_id": "log"},
    }
    versions = [
        SnapshotVersion(number, manifest(f"s{number}", **fields), ("champion",) if number == 6 else (), 0)
        for number, fields in made.items()
    ]
    assert {each.version for each in candidates(versions, {0: 8, 1: 3})} == {1, 5, 6}


def test_where_the_champion_agrees_best_nothing_is_told(setting: Setting) -> None:
    setting.emit(TEXTS[1], 10, "t")
    setting.earlier().compare("t")
    assert setting.control.put_values == []


def test_too_few_records_say_nothing(setting: Setting) -> None:
    setting.emit(TEXTS[0], 3, "t")
    setting.earlier().compare("t")
    setting.earlier(num_records=0).compare("t")
    assert setting.control.put_values == []


class Down(DirectoryRegistry):
    """A registry that is away."""

    def fetch(self, *args, **options):
        raise RegistryError("away")


def test_a_registry_that_is_away_is_no_reason_to_stop_learning(setting: Setting, caplog) -> None:
    setting.emit(TEXTS[0], 10, "t")
    down = Down(setting.folder / "registry", "drafter", "target", keep_resume=2)
    setting.earlier(down).compare("t")
    assert (setting.control.put_values, "were not compared" in caplog.text) == ([], True)


def test_few_snapshots_are_compared_and_those_with_a_part_to_play_among_them() -> None:
    aliases = {3: ("champion",), 2: ("previous",)}
    versions = [
        SnapshotVersion(number, manifest(f"s{number}", agreement_after=1 / number), aliases.get(number, ()), 0)
        for number in range(1, 12)
    ]
    chosen = [each.version for each in candidates(versions, {0: 0})]
    assert chosen == [3, 2, 11, 1, 4, 5]
    assert len(chosen) == MOST_SNAPSHOTS


def test_a_snapshot_without_weights_is_not_compared_and_a_champion_without_is_no_reason_to_stop_learning(
    setting: Setting, caplog
) -> None:
    setting.emit(TEXTS[0], 10, "t")
    setting.registry.remove_files(1, ("serving",))
    setting.earlier().compare("t")
    ((tenant, version, reason),) = setting.control.put_values
    assert (tenant, version, "1: " in reason) == ("t", 2, False)
    shutil.rmtree(version_folder(setting.folder / "registry", 3) / "snapshot/serving")
    setting.earlier().compare("t")
    assert "snapshot 3 is not compared" in caplog.text
