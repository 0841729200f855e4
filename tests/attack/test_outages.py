"""Outages that learning survives: a log that expired, was replaced or restored, damaged snapshots, full disks, wrong
clocks. After each: nothing is skipped in silence, and nothing learned twice in the line of snapshots that goes on."""

import contextlib
import errno
import itertools
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fastapi.testclient import TestClient

from omnidraft.audit.findings import Report
from omnidraft.audit.run import DiscardingWriter, audit, dead_letter_reasons
from omnidraft.bus import kafka_log
from omnidraft.bus.sqlite_log import MALFORMED, MAX_EXPIRED, SqliteReader, SqliteWriter
from omnidraft.config import RecorderSettings, WorkerSettings
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.distill.control import TrainingControl
from omnidraft.distill.ingest import dead_letters
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.distill.ingest.truncation_mark import TruncationMark
from omnidraft.errors import (
    BusError,
    LogTruncated,
    OffsetOutOfRange,
    RegistryError,
    RequestError,
    SnapshotCorrupt,
    SnapshotNotFound,
    StorageError,
)
from omnidraft.ports import Champion, Forget, Outgoing, PollResult, Restart
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.serving.app import application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader
from omnidraft.threads import SupervisedThread
from omnidraft.traces import archive, codec
from tests.control_logs import control_in, control_over
from tests.distiller_runs import Setting, learned, names, run_until_idle
from tests.snapshot_folders import make_bundle, version_folder
from tests.snapshot_followers import Worker, champion
from tests.trace_records import make_record

HOUR_MS = 3_600_000
ROOT = Path(__file__).parents[2]


class PromptReader(SqliteReader):
    """Never waits for messages."""

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        return super().poll(max_messages, 0)


class TruncatedReader(PromptReader):
    """Raises once, as Kafka's client does, that messages that were read are gone; others have their offsets by now."""

    def __init__(self, path: Path, *before: OffsetOutOfRange) -> None:
        """`before`: raised by the polls before."""
        super().__init__(path, "t")
        self._errors = [*before, LogTruncated("Detected truncated partitions")]

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        if self._errors:
            raise self._errors.pop(0)
        return super().poll(max_messages, timeout_s)


class Outage(Setting):
    """Trace log, dead letters and control log in SQLite, where things can be planted."""

    def __init__(self, pair, folder: Path) -> None:
        super().__init__(pair, folder)
        self.path, self.control = folder / "log.db", MemoryLog()

    def emit(self, *wanted: str, **changes) -> None:
        with closing(SqliteWriter(self.path, "t")) as writer:
            for name in wanted:
                record = self.record(name, **changes)
                writer.append([Outgoing(codec.key(record), codec.encode(record), codec.headers(record))])

    def distiller(self, **changes):
        control = TrainingControl(control_over(self.control))
        options = {"reader": PromptReader(self.path, "t"), "control": control} | changes
        return super().distiller(**options)

    def learn(self, **changes) -> list[str]:
        """Names of what a distiller learns until there is no more."""
        distillation, journal = self.distiller(**changes)
        run_until_idle(distillation)
        return learned(journal)

    def replace(self) -> None:
        """Have another log under the name of this one."""
        shutil.move(self.path, self.folder / "old.db")
        for each in self.folder.glob("log.db-*"):
            each.unlink()

    def order_restart(self, start: str) -> None:
        control_over(self.control).put(("restart",), Restart(start=start, id=uuid.uuid4().hex))

    def audit(self) -> Report:
        letters = dead_letter_reasons("t", dead_letters.read(MemoryReader(self.log, "dead"), idle_s=0))
        names_of_pair = {"target": "target", "drafter": "drafter"}
        with closing(SqliteReader(self.path, "t")) as reader:
            source = TraceConsumer(
                reader,
                DiscardingWriter(),
                self.pair.alignment.fingerprint,
                CountingMetrics(),
                topic="t",
                **names_of_pair,
            )
            ends, versions = reader.end_offsets(), self.registry.versions()
            return audit(source, ends, versions, letters, seen_keys=None, held_out_every=0, idle_s=0)

    def execute(self, statement: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(statement)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def outage(pair, tmp_path: Path) -> Outage:
    return Outage(pair, tmp_path)


# ---------------------------------------------------------------- the log


def test_away_for_longer_than_the_retention_learning_goes_on_at_the_oldest_and_counts_what_it_missed(outage, caplog):
    outage.emit(*names(4))
    assert outage.learn() == names(4)
    outage.emit(*names(10, start=4))
    outage.execute("DELETE FROM messages WHERE offset < 7")
    assert outage.learn() == names(6, start=7)
    manifest = outage.manifest()
    assert manifest.counts["expired"] == 3
    assert manifest.num_records + 3 == sum(manifest.offsets.values())
    assert "3 messages of partition 0 expired before they were learned (offsets 4 to 6)" in caplog.text
    report = outage.audit()
    assert (report.faults, report.num_expired) == ((), 3)


def test_what_expires_under_a_running_learner_is_counted_too(outage):
    """It holds records that it has not learned yet; those are learned, what lies behind them is gone."""
    outage.emit(*names(20))
    distillation, journal = outage.distiller()
    state = {"calls": 0}

    def stop() -> bool:
        state["calls"] += 1
        if distillation.status().num_steps == 1 and "deleted" not in state:
            state["deleted"] = True
            outage.emit(*names(4, start=20))
            distillation.ingest.batcher.start_at({0: 2})  # as if only the first step's records had been polled
            distillation.ingest.seek()
            outage.execute("DELETE FROM messages WHERE offset < 15")
        return state["calls"] > 60

    distillation.run(stop)
    assert learned(journal) == names(2) + names(8, start=15)
    assert outage.manifest().counts["expired"] == 13
    assert outage.audit().faults == ()


@pytest.mark.parametrize("start", ["earliest", "latest", "0:2"])
def test_a_log_that_was_made_anew_stops_learning_until_an_operator_says_where_to_go_on(outage, caplog, start):
    outage.emit(*names(4))
    outage.learn()
    outage.replace()
    outage.emit(*names(8, start=50))  # as many as before, and more
    assert outage.learn() == []
    assert "learning stands still: the log is another than the one that was learned from" in caplog.text
    assert "omnidraft learning restart --from earliest" in caplog.text
    assert outage.manifest().offsets == {0: 4}
    outage.order_restart(start)
    begin = {"earliest": 0, "latest": 8, "0:2": 2}[start]
    assert outage.learn() == names(8 - begin, start=50 + begin)
    outage.emit(*names(2, start=60))
    assert outage.learn() == names(2, start=60)  # the order is carried out once
    assert outage.audit().faults == ()


@pytest.mark.parametrize("first_offsets", [{}, {0: 1}], ids=["going on", "in the weights, too"])
def test_a_tenant_who_is_to_be_forgotten_while_the_log_is_another_one_is_forgotten_after_the_restart(
    outage, first_offsets
):
    """And until then nothing is learned, not even to forget exactly."""
    outage.emit(*names(4), tenant="leaver")
    outage.learn()
    outage.replace()
    outage.emit(*names(8, start=50))
    control_over(outage.control).put(
        ("forget", "leaver"), Forget(id="order", until_ms=HOUR_MS, first_offsets=first_offsets)
    )
    before = outage.manifest()
    assert (outage.learn(), outage.manifest()) == ([], before)
    outage.order_restart("earliest")
    assert set(outage.learn()) == set(names(8, start=50))
    assert (outage.manifest().forgets, outage.manifest().offsets) == (("order",), {0: 8})
    assert outage.audit().faults == ()


def test_a_log_restored_from_an_older_backup_is_told_and_restarted_once_across_a_death(outage, caplog):
    outage.emit(*names(4))
    shutil.copy(outage.path, outage.folder / "backup.db")
    outage.emit(*names(4, start=4))
    assert outage.learn() == names(8)
    shutil.copy(outage.folder / "backup.db", outage.path)
    distillation, journal = outage.distiller()
    waited = []

    def stop() -> bool:
        waited.append(distillation.status().waits_for)
        if len(waited) == 10:
            outage.order_restart("latest")
            outage.emit(*names(2, start=20))
        return len(waited) > 60

    distillation.run(stop)
    assert "offset 8 of partition 0, which ends at 4" in next(filter(None, waited))
    assert waited[-1] is None
    assert learned(journal) == []  # latest was after these two
    outage.emit(*names(2, start=30))
    assert outage.learn() == names(2, start=30)
    assert len(outage.manifest().restarts) == 1
    assert outage.audit().faults == ()


@pytest.mark.parametrize("before", [(), (OffsetOutOfRange("messages of another partition expired"),)])
def test_a_log_that_lost_messages_that_were_read_waits_for_an_operator_however_far_it_has_grown_since(outage, before):
    outage.emit(*names(4))
    outage.learn()
    outage.emit(*names(4, start=4))
    distillation, journal = outage.distiller(reader=TruncatedReader(outage.path, *before))
    waited = []

    def stop() -> bool:
        waited.append(distillation.status().waits_for)
        if len(waited) == 10:
            assert learned(journal) == []
            outage.order_restart("0:2")
        return len(waited) > 60

    distillation.run(stop)
    told = next(filter(None, waited))
    assert "the log lost messages that were read: Detected truncated partitions; order" in told
    assert '`omnidraft learning restart --from "0:4"`' in told
    assert "log.url" not in told
    assert waited[-1] is None
    assert learned(journal) == names(6, start=2)


def test_the_processes_after_one_that_saw_that_the_log_lost_messages_wait_for_the_operator_too(outage):
    def mark() -> TruncationMark:
        return TruncationMark(outage.folder / "notes" / "truncated.txt")

    outage.emit(*names(4))
    outage.learn()
    outage.emit(*names(4, start=4))
    assert outage.learn(reader=TruncatedReader(outage.path), truncation=mark()) == []
    assert outage.learn(truncation=mark()) == []
    outage.order_restart("0:2")
    assert outage.learn(truncation=mark()) == names(6, start=2)
    outage.emit(*names(2, start=8))
    assert outage.learn(truncation=mark()) == names(2, start=8)


def test_learning_that_begins_anew_does_not_wait_for_what_the_log_lost_before(outage):
    path = outage.folder / "truncated.txt"
    TruncationMark(path).set("Detected truncated partitions")
    outage.emit(*names(4))
    assert outage.learn(truncation=TruncationMark(path)) == names(4)
    assert not path.exists()


def test_a_process_that_cannot_note_that_the_log_lost_messages_says_so_and_waits_itself(outage, caplog):
    (outage.folder / "file").write_text("in the way")
    outage.emit(*names(4))
    outage.learn()
    mark = TruncationMark(outage.folder / "file" / "truncated.txt")
    assert outage.learn(reader=TruncatedReader(outage.path), truncation=mark) == []
    assert "learning stands still: the log lost messages that were read" in caplog.text
    assert caplog.text.count("truncated.txt cannot be written") == 1


def test_a_restart_to_a_place_that_the_log_lacks_is_refused_and_learning_goes_on(outage, caplog):
    outage.emit(*names(2))
    outage.learn()
    outage.order_restart("0:900")
    outage.emit(*names(2, start=2))
    assert outage.learn() == names(2, start=2)
    assert "learning is not restarted at 0:900: the log holds 0:0-4" in caplog.text


def test_a_control_log_that_was_made_anew_is_followed_and_nothing_in_it_looks_stale(tmp_path):
    path = tmp_path / "log.db"
    for version in range(1, 6):
        control_in(path).put(("champion",), Champion(version=version))
    follower = control_in(path)
    assert follower.poll(0)[0].champion == Champion(version=5)
    for each in tmp_path.iterdir():
        each.unlink()
    time.sleep(0.01)  # sequences are times
    control_in(path).put(("champion",), Champion(version=3))
    assert follower.poll(0)[0].champion == Champion(version=3)


def test_cells_that_are_no_headers_are_dead_letters_and_stop_nobody(outage):
    outage.emit(*names(9))
    cells = ["x'ff00'", "'no json'", "'[1]'", "'{\"a\": 1}'", "7", f"'{'[' * 5000}'", '\'{"a": "\\u20ac"}\'']
    for offset, cell in enumerate(cells):
        outage.execute(f"UPDATE messages SET headers = {cell} WHERE offset = {offset}")
    assert outage.learn() == names(2, start=7)
    letters = outage.log.topic("dead")[0]
    assert len(letters) == len(cells)
    assert all(f"original.{MALFORMED}" in each.headers for each in letters)


def test_keys_values_and_times_of_any_type_stop_nobody(outage):
    outage.emit(*names(6))
    for offset, column in enumerate(("key", "value", "timestamp_ms", "value")):
        cell = ("'text'", "CAST(x'ff' AS TEXT)", "'soon'", "12.5")[offset]
        outage.execute(f"UPDATE messages SET {column} = {cell} WHERE offset = {offset}")
    with closing(SqliteWriter(outage.path, "t", keep_s=3600)) as writer:
        writer.append([])
    assert set(names(2, start=4)) <= set(outage.learn())


# ---------------------------------------------------------------- snapshots


def damage_weights(folder: Path) -> None:
    weights = folder / bundle.DRAFTER
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def damage_by_loss(folder: Path) -> None:
    (folder / "resume" / "learner.safetensors").unlink()


def damage_part(folder: Path) -> None:
    shutil.rmtree(folder / "resume")


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"{")


DAMAGES = [damage_weights, damage_by_loss, damage_part, damage_manifest]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_snapshot_is_left_for_the_one_before_and_its_line_learns_nothing_twice(outage, caplog, damage):
    outage.emit(*names(8))
    outage.learn()
    newest = outage.registry.resolve("latest")
    assert newest.manifest.offsets == {0: 8}
    before = outage.registry.resolve(str(newest.version - 1)).manifest
    damage(version_folder(outage.folder / "registry", newest.version) / "snapshot")
    outage.emit(*names(4, start=8))
    assert outage.learn() == names(8, start=4)  # from the predecessor's offsets on
    assert f"{newest.version} is damaged" in caplog.text
    line = [outage.registry.resolve("latest").manifest]
    by_id = {each.manifest.snapshot_id: each.manifest for each in outage.registry.versions()}
    while line[0].parent_id is not None:
        line.insert(0, by_id[line[0].parent_id])
    assert before in line
    assert newest.manifest.snapshot_id not in [each.snapshot_id for each in line]
    assert line[-1].num_records == 12 == sum(line[-1].offsets.values())
    assert outage.audit().faults == ()


def test_without_the_resume_part_of_the_one_before_its_weights_and_offsets_go_on(outage, caplog):
    outage.registry = DirectoryRegistry(outage.folder / "registry", "drafter", "target", keep_resume=1)
    outage.emit(*names(8))
    outage.learn()
    newest = outage.registry.resolve("latest").version
    damage_weights(version_folder(outage.folder / "registry", newest) / "snapshot")
    assert outage.learn() == names(4, start=4)
    assert "has no optimizer any more" in caplog.text
    assert outage.manifest().num_records == 8
    assert outage.audit().faults == ()


def test_where_every_snapshot_is_damaged_learning_does_not_begin_anew_in_silence(outage):
    outage.emit(*names(4))
    outage.learn()
    for each in outage.registry.versions():
        folder = version_folder(outage.folder / "registry", each.version) / "snapshot"
        (folder / bundle.NGRAMS).write_bytes(b"?")
        if each.version > 1:
            damage_weights(folder)
    with pytest.raises(SnapshotCorrupt, match=r"each of the 2 snapshots .* `omnidraft snapshots publish"):
        outage.learn()


def test_where_no_manifest_can_be_read_learning_does_not_begin_anew_in_silence(outage):
    outage.emit(*names(4))
    outage.learn()
    for each in outage.registry.versions():
        damage_manifest(version_folder(outage.folder / "registry", each.version) / "snapshot")
    with pytest.raises(SnapshotCorrupt, match=r"no snapshot of this pair can be read: .* `omnidraft snapshots publish"):
        outage.learn()


@pytest.mark.parametrize("damage", [damage_weights, damage_manifest], ids=lambda damage: damage.__name__)
def test_a_worker_that_starts_under_a_damaged_champion_serves_the_one_before(tmp_path, caplog, damage):
    worker = Worker(tmp_path)
    worker.registry.promote(2)
    worker.registry.promote(3)
    damage(version_folder(worker.folder / "registry", 3) / "snapshot")
    assert worker.step() == 2
    assert "the champion cannot be loaded; the previous one, snapshot 2" in caplog.text
    assert worker.step(champion(3)) == 2
    worker.registry.promote(4)
    assert worker.step(champion(4)) == 4


# ---------------------------------------------------------------- disks


def test_while_a_snapshot_cannot_be_staged_learning_waits_and_then_goes_on(outage, caplog):
    outage.emit(*names(4))
    distillation, journal = outage.distiller()
    staging = outage.folder / "staging"
    state = {"calls": 0}

    def stop() -> bool:
        state["calls"] += 1
        if distillation.status().num_steps == 1 and "full" not in state:
            state["full"] = True
            shutil.rmtree(staging, ignore_errors=True)
            staging.write_bytes(b"in the way")
        if "trying again" in caplog.text and staging.is_file():
            staging.unlink()
        return state["calls"] > 60

    distillation.run(stop)
    assert "free space there" in caplog.text
    assert learned(journal) == names(4)
    assert outage.manifest().num_records == 4


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("call", "least_calls"), [("os.fsync", 9), ("os.replace", 2), ("os.link", 3), ("os.mkdir", 2)])
def test_a_disk_that_fills_up_anywhere_in_a_publish_is_an_error_of_ours_and_leaves_the_registry_whole(
    tmp_path, monkeypatch, call, least_calls
):
    second, original = make_bundle(tmp_path, "s2"), getattr(os, call.removeprefix("os."))
    for fails_at in itertools.count():
        registry = DirectoryRegistry(tmp_path / f"registry-{fails_at}", "org/small", "big", keep_resume=2)
        registry.promote(registry.publish(make_bundle(tmp_path / f"{fails_at}", "s1"), None).version)
        turns = itertools.count()

        def failing(*args, _fails_at=fails_at, _turns=turns, **kwargs):
            return no_room() if next(_turns) == _fails_at else original(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(call, failing)
            if call == "os.link":
                patched.setattr("shutil.copyfileobj", no_room)
            with contextlib.suppress(RegistryError, StorageError):
                registry.publish(second, 1)
        assert registry.resolve("champion").version == 1
        assert list((tmp_path / f"registry-{fails_at}").rglob(".v*.partial")) == []
        for each in registry.versions():
            bundle.verify(registry.fetch(each.version, tmp_path / f"{fails_at}", ("serving", "resume")), ["serving"])
        assert registry.publish(second, 1).version == 2
        if next(turns) <= fails_at:
            break  # each call has failed once
    assert fails_at >= least_calls


def test_a_full_disk_while_staging_is_told_as_such(tmp_path):
    """A real file system without room: tensors are written by safetensors, which has an error of its own."""
    limit = 64 << 10
    child = f"""
import resource, signal, numpy as np, pathlib
from omnidraft.errors import StorageError
from omnidraft.snapshots import bundle
from tests.snapshot_folders import manifest
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
folder = pathlib.Path({str(tmp_path)!r})
try:
    bundle.write(folder / "s", manifest(), {{"serving/drafter.safetensors": {{"w": np.zeros(1 << 20, np.float32)}}}})
except StorageError as exc:
    print(exc, list(folder.iterdir()))
"""
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "free space there" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_a_service_that_starts_on_a_full_disk_says_so():
    child = """
import resource
from omnidraft.errors import StorageError
from omnidraft.registry.staging import own_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    own_folder()
except StorageError as exc:
    raise SystemExit("free space there" not in str(exc)) from None
"""
    subprocess.run([sys.executable, "-c", child], cwd=ROOT, check=True)


def test_a_journal_that_cannot_be_written_stops_no_learning(outage, caplog):
    from omnidraft.distill.ingest.poison_detector import PoisonDetector

    (outage.folder / "file").write_text("in the way")
    outage.emit(*names(4))
    assert outage.learn(poison_detector=PoisonDetector(outage.folder / "file" / "trying.json", tries=2)) == names(4)
    assert caplog.text.count("crash journal cannot be written") == 1


def test_a_transaction_that_the_disk_refused_does_not_lock_the_log_for_good(tmp_path):
    path = tmp_path / "log.db"
    writer = SqliteWriter(path, "t", timeout_s=0.2)
    (pages,) = writer._topic.connection.execute("PRAGMA page_count").fetchone()
    writer._topic.connection.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(BusError, match="full"):
        writer.append([Outgoing(b"k", bytes(1 << 20))])
    writer._topic.connection.execute("PRAGMA max_page_count=100000")
    writer.append([Outgoing(b"k", b"v")])
    assert len(SqliteReader(path, "t").poll(5, 0).messages) == 1


@pytest.mark.parametrize("cells", ["next_offset = 'many'", "partition = 'none'"])
def test_tables_that_are_damaged_are_a_bus_error(tmp_path, cells):
    path = tmp_path / "log.db"
    writer, reader = SqliteWriter(path, "t"), SqliteReader(path, "t")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE partitions SET {cells}")
    for use in (partial(writer.append, [Outgoing(b"k", b"v")]), lambda: reader.poll(1, 0), reader.end_offsets):
        with pytest.raises(BusError, match="is damaged"):
            use()


# ---------------------------------------------------------------- power


class Disk:
    """A disk below `root` that keeps what was synced; of the rest of the names it keeps none, all or some.

    It looks at the real folder whenever something is synced, renamed or linked: what a file held when it was synced,
    and which names a folder had.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.crashes: list[Callable[[Path, random.Random | None], None]] = []

    def synced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self.names[found.st_ino] = {each.name: each.lstat().st_ino for each in path.iterdir()}
        else:
            self.contents[found.st_ino] = path.read_bytes()

    def image(self, into: Path, keeps: Callable[[], bool]) -> Path:
        """Write the files as after a crash; `keeps` says whether a folder has its present names, or those synced."""
        paths = {path.lstat().st_ino: path for path in [self.root, *self.root.rglob("*")]}
        self._folder(self.root.lstat().st_ino, into, paths, keeps)
        return into

    def _folder(self, inode: int, into: Path, paths: dict[int, Path], keeps: Callable[[], bool]) -> None:
        into.mkdir()
        now = {each.name: each.lstat().st_ino for each in paths[inode].iterdir()} if inode in paths else {}
        names = now if keeps() and inode in paths else self.names.get(inode, {})
        for name, child in names.items():
            is_folder = child in self.names or (child in paths and paths[child].is_dir())
            if is_folder:
                self._folder(child, into / name, paths, keeps)
            else:
                (into / name).write_bytes(self.contents.get(child, b""))


def test_a_crash_at_any_point_of_a_publish_and_a_promotion_leaves_the_old_or_the_new_state(tmp_path, monkeypatch):
    """Every sync, rename and link is a point; at each, unsynced names are lost, kept, and kept here and there."""
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    images = (tmp_path / f"image-{number}" for number in itertools.count())
    states: list[tuple[tuple[int, ...], int | None]] = []

    def state(folder: Path) -> tuple[tuple[int, ...], int | None]:
        registry = DirectoryRegistry(folder / "registry", "org/small", "big", keep_resume=2)
        if not (folder / "registry").exists():
            return (), None
        numbers = tuple(each.version for each in registry.versions())
        folders = [path for path in (folder / "registry").rglob("v0*") if path.is_dir()]
        assert len(folders) == len(numbers), "a version that can be seen is not whole"
        for number in numbers:
            registry.fetch(number, folder / "cache", ("serving", "resume"))
        try:
            return numbers, registry.resolve("champion").version
        except SnapshotNotFound:
            return numbers, None

    dice = random.Random(0)

    def crash() -> None:
        for share in (0.0, 1.0, 0.5, 0.5, 0.5, 0.5):
            image = disk.image(next(images), lambda share=share: dice.random() < share)
            states.append(state(image))
            shutil.rmtree(image)

    is_watching = [True]

    def watched(call: Callable, note: Callable[[int], None] | None = None) -> Callable:
        def called(*args, **kwargs):
            result = call(*args, **kwargs)
            if is_watching[0]:
                is_watching[0] = False
                if note is not None:
                    note(*args)
                crash()
                is_watching[0] = True
            return result

        return called

    def lasting() -> tuple[tuple[int, ...], int | None]:
        is_watching[0] = False
        found = state(disk.image(next(images), lambda: False))
        is_watching[0] = True
        return found

    bundles = [make_bundle(tmp_path, name) for name in ("s1", "s2")]
    monkeypatch.setattr("os.fsync", watched(os.fsync, disk.synced))
    for name in ("os.replace", "os.rename", "os.link"):
        monkeypatch.setattr(name, watched(getattr(os, name.removeprefix("os."))))
    registry = DirectoryRegistry(disk.root / "registry", "org/small", "big", keep_resume=2)
    for number, folder in enumerate(bundles, start=1):
        registry.publish(folder, number - 1 or None)
        assert lasting()[0] == tuple(range(1, number + 1))  # published is published
        registry.promote(number)
        assert lasting()[1] == number
    order = [((), None), ((1,), None), ((1,), 1), ((1, 2), 1), ((1, 2), 2)]
    assert len(states) > 200
    assert set(states) == set(order)
    assert [order.index(each) for each in states[::6]] == sorted(order.index(each) for each in states[::6])


def test_a_bundle_that_can_be_seen_is_whole_after_a_crash(tmp_path, monkeypatch):
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    original, seen = os.replace, []

    def replaced(source: Path, target: Path) -> None:
        original(source, target)
        image = disk.image(tmp_path / "image", lambda: True)
        seen.append(bundle.verify(image / "s1", ["serving", "resume"]).snapshot_id)

    real = os.fsync
    monkeypatch.setattr("os.replace", replaced)
    monkeypatch.setattr("os.fsync", lambda descriptor: (real(descriptor), disk.synced(descriptor)))
    make_bundle(disk.root, "s1")
    assert seen == ["s1"]


@pytest.mark.parametrize(("error", "is_told"), [(errno.EIO, True), (errno.EINVAL, False), (errno.ENOTSUP, False)])
def test_a_disk_that_cannot_keep_the_name_of_an_archive_says_so_but_not_one_that_syncs_no_folders(
    tmp_path, monkeypatch, error, is_told
):
    real = os.fsync

    def synced(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(error, os.strerror(error))
        real(descriptor)

    monkeypatch.setattr("os.fsync", synced)
    with pytest.raises(RequestError, match=os.strerror(errno.EIO)) if is_told else contextlib.nullcontext():
        archive.write(tmp_path / "traces.avro", [make_record()])
    assert len(list(archive.read(tmp_path / "traces.avro"))) == 1


def test_an_archive_that_can_be_seen_is_whole_after_a_crash(tmp_path, monkeypatch):
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    real = os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: (real(descriptor), disk.synced(descriptor)))
    archive.write(disk.root / "traces.avro", [make_record()])
    for keeps in (False, True):
        image = disk.image(tmp_path / f"image-{keeps}", lambda keeps=keeps: keeps)
        assert len(list(archive.read(image / "traces.avro"))) == 1


# ---------------------------------------------------------------- health


class Lethal(SqliteWriter):
    """Raises what nobody foresaw."""

    def append(self, messages) -> None:
        raise ZeroDivisionError("nobody foresaw this")


def test_a_dead_recorder_or_refresher_turns_health_red_and_one_that_was_told_to_end_does_not(tmp_path):
    recorder = TraceProducer(lambda: Lethal(tmp_path / "log.db", "t"), RecorderSettings(), CountingMetrics())
    stop = threading.Event()
    fine = SupervisedThread(stop.wait, name="refresher of big", is_over=stop.is_set)
    fine.start()
    requests = RequestQueue(CountingMetrics(), max_waiting=1)
    client = TestClient(
        application(requests, [SimpleNamespace(name="big")], WorkerSettings(), lambda: b"", [fine, recorder])
    )
    assert client.get("/healthz").status_code == 200
    recorder.emit(make_record())
    wait_until(lambda: recorder.problem is not None)
    red = client.get("/healthz")
    assert red.status_code == 503
    assert "trace-recorder thread ended: ZeroDivisionError: nobody foresaw this" in red.json()["status"]
    stop.set()
    fine.join(5)
    assert fine.problem is None
    early = SupervisedThread(lambda: None, name="refresher of big", is_over=lambda: False)
    early.start()
    early.join(5)
    assert early.problem == "the refresher of big thread ended; restart this process"
    requests.close(1)


# ---------------------------------------------------------------- clocks


class Clock:
    """The machine's, ahead by so many hours, when so many hours have passed."""

    hours = 0.0
    passed_hours = 0.0

    def time_ns(self) -> int:
        return time.time_ns() + int((self.hours + self.passed_hours) * HOUR_MS * 1_000_000)

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + int(self.passed_hours * HOUR_MS * 1_000_000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("omnidraft.bus.sqlite_log.time", made)
    return made


def held(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        return [offset for (offset,) in connection.execute("SELECT offset FROM messages ORDER BY offset")]


def append(path: Path, number: int = 1, keep_hours: float | None = 24) -> None:
    with closing(SqliteWriter(path, "t", keep_s=keep_hours and keep_hours * 3600)) as writer:
        for _ in range(number):
            writer.append([Outgoing(b"k", b"v")])


def test_a_clock_that_jumps_ahead_deletes_nothing_until_it_has_said_so_for_an_hour(tmp_path, clock):
    path = tmp_path / "log.db"
    append(path, 5)
    clock.hours = 24 * 3650
    append(path, 3)
    assert held(path) == list(range(8))
    clock.hours = 0
    append(path)
    assert held(path) == list(range(9))
    clock.hours = 24 * 3650
    append(path, 1)
    clock.passed_hours = 1.1
    append(path, 1)
    assert held(path)[0] > 4  # it is believed by now


def test_a_second_step_of_the_clock_does_not_end_the_hold_of_the_first(tmp_path, clock):
    path = tmp_path / "log.db"
    append(path, 5, keep_hours=1)
    for clock.hours in (2, 24 * 500):
        append(path, 1, keep_hours=1)
    assert held(path) == list(range(7))


def test_a_restart_of_the_machine_begins_the_hold_again(tmp_path, clock):
    path = tmp_path / "log.db"
    append(path, 5)
    clock.hours, clock.passed_hours = 24 * 3650, 10
    append(path, 1)
    for clock.passed_hours in (0, 0.9):
        append(path, 1)
        assert held(path)[0] == 0
    clock.passed_hours = 1.1
    append(path, 1)
    assert held(path)[0] > 4


@pytest.mark.parametrize("number", [3, MAX_EXPIRED + 100])
def test_messages_from_the_future_expire_with_those_behind_them(tmp_path, clock, number):
    path = tmp_path / "log.db"
    clock.hours = 24 * 3650
    with closing(SqliteWriter(path, "t")) as writer:
        writer.append([Outgoing(b"k", b"v")] * number)
    clock.hours = 0
    append(path, 2)
    assert len(held(path)) == number + 2  # they are younger than a day, for all that is known
    clock.hours = 20
    append(path)
    clock.hours = 25
    append(path, 4)
    assert held(path)[0] == number + 2


def test_a_clock_that_was_behind_deletes_only_what_claims_to_be_old(tmp_path, clock):
    path = tmp_path / "log.db"
    append(path, 2)
    clock.hours = -1000
    append(path, 2)
    clock.hours = 0
    append(path, 3)
    assert held(path) == list(range(7))


# ---------------------------------------------------------------- Kafka


class KafkaOutage(Outage):
    """The trace log on a real broker."""

    def __init__(self, pair, folder: Path, servers: str) -> None:
        super().__init__(pair, folder)
        self.servers, self.topic = servers, f"outage-{uuid.uuid4().hex}"

    def emit(self, *wanted: str, **changes) -> None:
        records = [self.record(name, **changes) for name in wanted]
        with closing(kafka_log.KafkaWriter(self.servers, self.topic)) as writer:
            writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in records])

    def learn(self, **changes) -> list[str]:
        with closing(kafka_log.KafkaReader(self.servers, self.topic)) as reader:
            distillation, journal = self.distiller(reader=reader, **changes)
            run_until_idle(distillation, 4)
            return learned(journal)


@pytest.fixture
def on_kafka(pair, tmp_path: Path, kafka_bootstrap: str) -> KafkaOutage:
    return KafkaOutage(pair, tmp_path, kafka_bootstrap)


@pytest.mark.kafka
def test_what_a_broker_deleted_is_counted_and_a_topic_made_anew_waits_for_an_operator(on_kafka, caplog):
    from kafka import KafkaAdminClient, TopicPartition

    on_kafka.emit(*names(4))
    assert on_kafka.learn() == names(4)
    on_kafka.emit(*names(6, start=4))
    with closing(KafkaAdminClient(bootstrap_servers=on_kafka.servers)) as admin:
        admin.delete_records({TopicPartition(on_kafka.topic, 0): 6})
        assert on_kafka.learn() == names(4, start=6)
        assert on_kafka.manifest().counts["expired"] == 2
        admin.delete_topics([on_kafka.topic])
        wait_until(lambda: on_kafka.topic not in admin.list_topics())
    on_kafka.emit(*names(12, start=40))
    assert on_kafka.learn() == []
    assert "learning stands still: the log is another than the one" in caplog.text
    on_kafka.order_restart("earliest")
    assert on_kafka.learn() == names(12, start=40)
    assert on_kafka.learn() == []


def wait_until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
