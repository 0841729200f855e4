"""Outages that learning survives: a log that expired, was replaced or restored, damaged snapshots, full disks, wrong
clocks. After each: nothing is skipped in silence, and nothing learned twice in the line of snapshots that goes on."""

import shutil
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from omnidraft.bus.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.bus.sqlite_log import MALFORMED, SqliteReader, SqliteWriter
from omnidraft.distill import dead_letters
from omnidraft.distill.audit.findings import Report
from omnidraft.distill.audit.run import Unwritten, audit, letters_of
from omnidraft.distill.guidance import Guidance
from omnidraft.distill.source import TraceSource
from omnidraft.errors import OffsetOutOfRange
from omnidraft.fleet import announcements
from omnidraft.fleet.follower import ControlFollower
from omnidraft.ports import Outgoing, Polled
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from tests.unit.distill.conftest import one_thread, pair  # noqa: F401  (fixtures: pytest finds them by name)
from tests.unit.distill.test_loop import TEXTS, Setting, impatient, learned, names, run_until_idle  # noqa: F401

HOUR_MS = 3_600_000


class PromptReader(SqliteReader):
    """Never waits for messages."""

    def poll(self, max_messages: int, timeout_s: float) -> Polled:
        return super().poll(max_messages, 0)


class Outage(Setting):
    """Trace log, dead letters and control log in SQLite, where things can be planted."""

    def __init__(self, pair, folder: Path) -> None:  # noqa: F811
        super().__init__(pair, folder)
        self.path, self.control = folder / "log.db", MemoryLog()

    def emit(self, *wanted: str, **changes) -> None:
        with closing(SqliteWriter(self.path, "t")) as writer:
            for name in wanted:
                record = self.pair.record(name, TEXTS[len(name) % 3], **changes)
                writer.append([Outgoing(codec.key(record), codec.encode(record), codec.headers(record))])

    def distiller(self, **changes):
        follower = ControlFollower(MemoryReader(self.control, "c"), CountingMetrics(), kinds=("pause", "restart"))
        options = {"reader": PromptReader(self.path, "t"), "guidance": Guidance(follower)} | changes
        return super().distiller(**options)

    def learn(self, **changes) -> list[str]:
        """Names of what a distiller learns until there is no more."""
        distillation, journal = self.distiller(**changes)
        run_until_idle(distillation)
        return learned(journal)

    def order_restart(self, start: str) -> None:
        order = {"start": start, "restart_id": uuid.uuid4().hex}
        announcements.tell(MemoryWriter(self.control, "c"), "restart", **order)

    def audit(self) -> Report:
        letters = letters_of("t", dead_letters.read(MemoryReader(self.log, "dead"), idle_s=0))
        names_of_pair = {"target": "target", "drafter": "drafter"}
        with closing(SqliteReader(self.path, "t")) as reader:
            source = TraceSource(
                reader, Unwritten(), self.pair.alignment.fingerprint, CountingMetrics(), topic="t", **names_of_pair
            )
            ends, versions = reader.end_offsets(), self.registry.versions()
            return audit(source, ends, versions, letters, remembered=None, held_out_every=0, idle_s=0)

    def execute(self, statement: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(statement)


@pytest.fixture
def outage(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outage:  # noqa: F811
    monkeypatch.setattr("omnidraft.distill.loop.WAITING_S", 0.0)
    return Outage(pair, tmp_path)


# ---------------------------------------------------------------- the log


def test_away_for_longer_than_the_retention_learning_goes_on_at_the_oldest_and_counts_what_it_missed(outage, caplog):
    outage.emit(*names(4))
    assert outage.learn() == names(4)
    outage.emit(*names(10, start=4))
    outage.execute("DELETE FROM messages WHERE offset < 7")
    assert outage.learn() == names(6, start=7)
    manifest = outage.manifest()
    assert manifest.counts == {"expired": 3}
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
            distillation._intake.start_at({0: 2})  # as if only the first step's records had been polled
            distillation._source.seek({0: 2})
            outage.execute("DELETE FROM messages WHERE offset < 15")
        return state["calls"] > 60

    distillation.run(stop)
    assert learned(journal) == names(2) + names(8, start=15)
    assert outage.manifest().counts == {"expired": 13}
    assert outage.audit().faults == ()


@pytest.mark.parametrize("start", ["earliest", "latest", "0:2"])
def test_a_log_that_was_made_anew_stops_learning_until_an_operator_says_where_to_go_on(outage, caplog, start):
    outage.emit(*names(4))
    outage.learn()
    shutil.move(outage.path, outage.folder / "old.db")
    for each in outage.folder.glob("log.db-*"):
        each.unlink()
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


def test_a_file_put_in_the_place_of_an_open_log_is_seen_by_its_readers_and_writers(outage):
    outage.emit(*names(2))
    reader, writer = SqliteReader(outage.path, "t"), SqliteWriter(outage.path, "t")
    identity = reader.identity()
    outage.path.unlink()
    writer.append([Outgoing(b"k", b"v")])
    with pytest.raises(OffsetOutOfRange, match="was replaced"):
        reader.poll(10, timeout_s=0)
    reader.seek({})
    assert [each.value for each in reader.poll(10, timeout_s=0).messages] == [b"v"]
    assert reader.identity() != identity


def test_a_log_from_before_identities_is_given_one_that_stays_and_old_manifests_go_on(outage):
    outage.emit(*names(4))
    outage.learn()
    newest = outage.registry.resolve("latest").version
    folder = outage.registry._folder(newest) / "snapshot"
    bundle.write_manifest(folder, bundle.read_manifest(folder).model_copy(update={"log_id": None}))
    outage.execute("DROP TABLE topics")
    outage.emit(*names(2, start=4))
    with closing(SqliteReader(outage.path, "t")) as reader:
        identity = reader.identity()
    assert outage.learn() == names(2, start=4)
    assert outage.manifest().log_id == identity


def test_a_restart_to_a_place_that_the_log_lacks_is_refused_and_learning_goes_on(outage, caplog):
    outage.emit(*names(2))
    outage.learn()
    outage.order_restart("0:900")
    outage.emit(*names(2, start=2))
    assert outage.learn() == names(2, start=2)
    assert "learning is not restarted at 0:900: the log holds 0:0-4" in caplog.text


def test_a_control_log_that_was_made_anew_is_followed_and_nothing_in_it_looks_stale(tmp_path):
    path = tmp_path / "log.db"
    with closing(SqliteWriter(path, "control")) as writer:
        for version in range(1, 6):
            announcements.tell(writer, "champion", version)
    follower = ControlFollower(SqliteReader(path, "control"), CountingMetrics(), kinds=("champion",))
    (before,) = follower.poll(0)
    for each in tmp_path.iterdir():
        each.unlink()
    with closing(SqliteWriter(path, "control")) as writer:
        announcements.tell(writer, "champion", 3)
    (after,) = follower.poll(0)
    assert (after.version, before.version) == (3, 5)
    assert after.sequence > before.sequence


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
