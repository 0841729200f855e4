"""`omnidraft tenants`: what it destroys, refuses, repeats and prints, on SQLite, PostgreSQL and a real broker."""

import io
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from omnidraft import assembly, config, progress
from omnidraft.assembly import tenants as assembly_tenants
from omnidraft.bus import sqlite_forget
from omnidraft.bus.encryption import new_key
from omnidraft.bus.key_store import KeyStore
from omnidraft.bus.sqlite_log import delete_before
from omnidraft.bus.tenant_keys import TenantKeys
from omnidraft.cli import tenants as cli_tenants
from omnidraft.distill.ingest import topic_scan
from omnidraft.doctor.all_checks import key_store
from omnidraft.doctor.finding import Verdict
from omnidraft.errors import BusError, RecordForgotten
from omnidraft.ports import Registry
from omnidraft.telemetry.metrics import CountingMetrics
from tests.cli_runs import run_cli
from tests.integration.settings_runs import environ, learn, record
from tests.postgres_fixture import Postgres
from tests.snapshot_folders import make_bundle

MASTER = new_key()

Run = Callable[..., subprocess.CompletedProcess[str]]


def make_settings(registry: str = "directory:///nowhere/registry", **log: Any) -> config.Settings:
    return config.load(None, {}, log=log, registry={"url": registry})


@pytest.fixture
def sqlite(tmp_path: Path) -> config.Settings:
    return make_settings(url=f"sqlite:///{tmp_path}/log.db", encryption_keys=[MASTER])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda settings, *command: run_cli(("tenants", *command), monkeypatch, capsys, environ(settings))


def orders(settings: config.Settings) -> int:
    with closing(assembly.log_reader(settings, settings.log.control_topic)) as reader:
        return len(list(topic_scan.messages(reader)))


def test_a_tenant_who_comes_back_has_a_new_key_and_forgetting_again_orders_nothing_new(
    sqlite: config.Settings, run: Run
) -> None:
    record(sqlite, "a/1", "b/1")
    assert "1 keys, 1 trace records (1 readable)" in run(sqlite, "forget", "a", "--yes").stdout
    record(sqlite, "a/2")
    assert learn(sqlite) == (["b/1", "a/2"], ["forgotten"])
    for _ in range(2):
        assert run(sqlite, "forget", "a", "--yes").returncode == 0
        assert learn(sqlite) == (["b/1"], ["forgotten", "forgotten"])
        assert orders(sqlite) == 2


def test_a_tenant_that_came_back_and_left_no_message_is_forgotten_again(
    sqlite: config.Settings, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots and memories may hold what retention has deleted from the log since the last order."""
    unencrypted = sqlite.model_copy(update={"log": sqlite.log.model_copy(update={"encryption_keys": ()})})
    record(unencrypted, "a/1")
    assert run(unencrypted, "forget", "a", "--yes").returncode == 0
    with closing(assembly.log_reader(unencrypted, unencrypted.log.traces_topic)) as reader:
        ends = reader.end_offsets()
    delete_before(tmp_path / "log.db", unencrypted.log.traces_topic, ends)
    data = assembly_tenants.tenant_data(unencrypted, "a")
    assert data.traces.newest_ms == 0
    first = assembly_tenants.forget(unencrypted, "a", data)
    assert orders(unencrypted) == 1
    monkeypatch.setattr(assembly_tenants, "_REPEATED_S", -1.0)
    assert assembly_tenants.forget(unencrypted, "a", data).order != first.order
    assert orders(unencrypted) == 2


def test_an_order_reaches_up_to_the_newest_record_of_a_worker_whose_clock_is_ahead(
    sqlite: config.Settings, run: Run
) -> None:
    ahead_ms = time.time_ns() // 1_000_000 + 3_600_000
    for number in (1, 2):
        record(sqlite, f"a/{number}", time_ms=ahead_ms + number)
        assert run(sqlite, "forget", "a", "--yes").returncode == 0
        last = assembly.control_log(sqlite, CountingMetrics()).read_whole().forget("a")
        assert last is not None
        assert last.until_ms == ahead_ms + number
    assert run(sqlite, "forget", "a", "--yes").returncode == 0
    assert orders(sqlite) == 2


def test_nothing_is_done_without_a_yes_or_without_the_key_store(
    sqlite: config.Settings, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(sqlite, "a/1")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    unasked = run(sqlite, "forget", "a")
    assert (unasked.returncode, "1 trace records (1 readable)" in unasked.stdout) == (1, True)
    monkeypatch.setenv("OMNIDRAFT_LOG__REQUEST_TIMEOUT_S", "0.1")
    with closing(sqlite3.connect(tmp_path / "keys.db")) as database:
        database.execute("BEGIN EXCLUSIVE")
        locked = run(sqlite, "forget", "a", "--yes")
        assert (locked.returncode, "key store" in locked.stderr) == (2, True)
    assert learn(sqlite) == (["a/1"], [])


def learned(settings: config.Settings, folder: Path) -> tuple[Registry, dict[str, Any]]:
    """The registry with a base snapshot and one that learned all of the log, and the fields of the next."""
    with closing(assembly.log_reader(settings, settings.log.traces_topic)) as reader:
        ends, log_id = reader.end_offsets(), reader.identity()
    registry, pair = assembly.registry(settings), {"target": settings.models.target, "drafter": settings.models.drafter}
    registry.publish(make_bundle(folder, "s1", train="base", **pair), None)
    fields = {"offsets": ends, "log_id": log_id, "num_records": 8, "created_ms": 120_001, **pair}
    registry.publish(make_bundle(folder, "s2", parent_id="s1", **fields), 1)
    return registry, fields


def test_nobody_is_forgotten_of_whom_nothing_is_known_unless_the_log_has_lost_messages(
    sqlite: config.Settings, run: Run, tmp_path: Path
) -> None:
    record(sqlite, "a/1", "b/1")
    unknown = run(sqlite, "forget", "zoe", "--yes")
    assert (unknown.returncode, "nothing of zoe is known here" in unknown.stderr, orders(sqlite)) == (2, True, 0)
    with closing(assembly.log_reader(sqlite, sqlite.log.traces_topic)) as reader:
        delete_before(tmp_path / "log.db", sqlite.log.traces_topic, reader.end_offsets())
    done = run(sqlite, "forget", "zoe", "--yes")
    assert (done.returncode, "deleted since it began is not known" in done.stdout, orders(sqlite)) == (0, True, 1)


def test_what_is_said_while_the_log_is_learned_again_and_when_it_is_done(
    sqlite: config.Settings, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(url=sqlite.log.url, encryption_keys=[MASTER], registry=f"directory:///{tmp_path}/registry")
    record(settings, *(f"{tenant}/{number}" for number in range(4) for tenant in "ba"))
    registry, fields = learned(settings, tmp_path)
    registry.promote(2)
    assert run(settings, "forget", "a", "--exact", "--yes", "--wait", "0").returncode == 1
    order = assembly.control_log(settings, CountingMetrics()).read_whole().forget("a")
    assert order is not None
    ends, forgets = fields["offsets"], {"forgets": (order.id,)}
    part = {partition: end - (end > 2) for partition, end in ends.items()}
    again = fields | forgets | {"offsets": part, "catching_up_to": ends}
    registry.publish(make_bundle(tmp_path, "s3", parent_id="s1", **again), 2)
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.5)
    monkeypatch.setattr(cli_tenants, "SILENCE_S", 0.1)
    waits = run(settings, "forget", "a", "--exact", "--yes", "--wait", "1.5", "--purge-snapshots")
    assert (waits.returncode, "not done yet" in waits.stdout) == (1, True), waits
    assert waits.stdout.count("does a distiller run?") == 1
    assert "stays in snapshots 2 until this command, when it is repeated, deletes" in waits.stdout
    with closing(assembly.log_reader(settings, settings.log.traces_topic)) as reader:
        messages = list(topic_scan.messages(reader))
    num = sum(each.offset < part[each.partition] and each.key.startswith(b"b") for each in messages)
    assert f"learning the log again: messages: {num} of 4\n" in waits.stderr
    plain = run(settings, "forget", "a", "--yes")
    assert "promote latest" not in waits.stdout + plain.stdout
    registry.publish(make_bundle(tmp_path, "s4", parent_id="s3", **fields, **forgets), 3)
    done = run(settings, "forget", "a", "--exact", "--yes", "--wait", "0")
    assert (done.returncode, "the newest weights never saw a; certificate, unsigned: set " in done.stdout) == (0, True)
    assert "stays in snapshots 2 until --purge-snapshots deletes" in done.stdout
    assert "children" not in done.stdout


def test_what_it_costs_to_forget_in_the_weights_is_shown_and_where_the_log_lost_its_beginning_nothing_is_done(
    sqlite: config.Settings, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    settings = make_settings(url=sqlite.log.url, encryption_keys=[MASTER], registry=f"directory:///{tmp_path}/registry")
    record(settings, *(f"{tenant}/{number}" for number in range(4) for tenant in "ba"))
    ends = learned(settings, tmp_path)[1]["offsets"]
    record(settings, "b/8", "b/9")  # which the distiller has read, and not published
    asked = run(settings, "forget", "a", "--exact")
    assert (asked.returncode, orders(settings)) == (1, 0)
    said = "learning goes back to snapshot 1 and reads up to 6 messages, 1.5 minutes for all at the best pace so far"
    assert said in asked.stdout
    for accepts, words in (((), "nothing of nobody is known here"), (("--accept-retention",), "without --exact")):
        unknown = run(settings, "forget", "nobody", "--exact", "--yes", *accepts)
        assert (unknown.returncode, words in unknown.stderr, orders(settings)) == (2, True, 0)
    delete_before(tmp_path / "log.db", settings.log.traces_topic, {each: 1 for each, end in ends.items() if end > 2})
    refused = run(settings, "forget", "a", "--exact", "--yes")
    assert (refused.returncode, "without --exact it is forgotten" in refused.stderr) == (2, True)
    assert "(log.retention_hours)" in refused.stderr.replace("registry.keep_resume, ", "")
    assert orders(settings) == 0
    assert "0 readable" not in run(settings, "forget", "a", "--yes", "--wait", "0").stdout
    assert orders(settings) == 1


@pytest.mark.parametrize("step", ["_delete_messages", "order_forgetting"])
def test_a_command_killed_after_the_key_was_destroyed_is_finished_by_repeating_it(
    sqlite: config.Settings, run: Run, tmp_path: Path, step: str
) -> None:
    record(sqlite, "a/1", "b/1", "a/2")
    code = (
        "import os, signal, sys; from omnidraft.assembly import tenants; from omnidraft.cli import main\n"
        f"tenants.{step} = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.argv = ['omnidraft', 'tenants', 'forget', 'a', '--yes']; main()\n"
    )
    options: dict[str, Any] = {"env": os.environ | environ(sqlite), "timeout": 60, "capture_output": True}
    killed = subprocess.run([sys.executable, "-c", code], check=False, **options)
    assert killed.returncode == -signal.SIGKILL
    assert learn(sqlite) == (["b/1"], ["forgotten", "forgotten"])
    assert orders(sqlite) == 0
    done = run(sqlite, "forget", "a", "--yes")
    assert (done.returncode, "2 trace records (0 readable)" in done.stdout) == (0, True), done.stdout + done.stderr
    assert orders(sqlite) == 1
    assert all(b"a/1" not in path.read_bytes() for path in tmp_path.glob("log.db*"))


def test_where_the_disk_is_too_full_to_vacuum_the_order_is_given_all_the_same(
    sqlite: config.Settings, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(*_: Any) -> None:
        raise BusError("vacuuming: database or disk is full")

    record(sqlite, "a/1", "b/1")
    with monkeypatch.context() as patched:
        patched.setattr(sqlite_forget, "shrink", fill_disk)
        refused = run(sqlite, "forget", "a", "--yes")
    assert (refused.returncode, "disk is full" in refused.stderr) == (2, True)
    assert (learn(sqlite), orders(sqlite)) == ((["b/1"], ["forgotten"]), 1)
    assert run(sqlite, "forget", "a", "--yes").returncode == 0
    assert orders(sqlite) == 1
    assert all(b"a/1" not in path.read_bytes() for path in tmp_path.glob("log.db*"))


@pytest.mark.kafka
def test_without_a_key_store_kafka_leaves_it_to_retention_and_says_so(
    kafka_bootstrap: str, run: Run, tmp_path: Path
) -> None:
    prefix = f"plain-{uuid.uuid4().hex[:8]}"
    for master_keys in ([], [MASTER]):
        settings = make_settings(
            f"directory:///{tmp_path}/registry-{len(master_keys)}",
            url=f"kafka://{kafka_bootstrap}",
            topic_prefix=f"{prefix}-{len(master_keys)}",
            encryption_keys=master_keys,
        )
        record(settings, "a/1", "b/1")
        learned(settings, tmp_path / str(len(master_keys)))
        for exact in ((), ("--exact",)):
            refused = run(settings, "forget", "a", "--yes", *exact)
            assert (refused.returncode, "--accept-retention" in refused.stderr) == (2, True)
            assert "learning goes back" not in refused.stdout
        assert orders(settings) == 0
        done = run(settings, "forget", "a", "--yes", "--accept-retention")
        assert (done.returncode, "left until Kafka's retention" in done.stdout) == (0, True)
        assert orders(settings) == 1


@pytest.mark.kafka
def test_in_kafka_the_destroyed_key_makes_records_unreadable_and_nothing_is_done_without_the_key_store(
    kafka_bootstrap: str, run: Run, tmp_path: Path
) -> None:
    prefix = f"keys-{uuid.uuid4().hex[:8]}"
    log = {"url": f"kafka://{kafka_bootstrap}", "topic_prefix": prefix, "encryption_keys": [MASTER]}
    settings = make_settings(**log, key_store=f"sqlite:///{tmp_path}/keys.db")
    record(settings, "a/1", "b/1", "a/2")
    refused = run(make_settings(**log), "forget", "a", "--yes")
    assert (refused.returncode, "log.key_store" in refused.stderr, orders(settings)) == (2, True, 0)
    assert run(settings, "forget", "a", "--yes").returncode == 0
    assert learn(settings) == (["b/1"], ["forgotten", "forgotten"])


def test_a_new_master_key_takes_over_by_rewrapping(sqlite: config.Settings, run: Run) -> None:
    record(sqlite, "a/1", "b/1")
    newer = new_key()
    both = make_settings(url=sqlite.log.url, encryption_keys=[newer, MASTER])
    done = run(both, "rewrap")
    assert (done.returncode, done.stdout.strip()) == (0, "2 keys wrapped with the newest master key")
    assert learn(make_settings(url=sqlite.log.url, encryption_keys=[newer]))[0] == ["a/1", "b/1"]
    old = make_settings(url=sqlite.log.url, encryption_keys=[MASTER])
    assert [key_store(each).verdict for each in (both, old)] == [Verdict.OK, Verdict.PROBLEM]
    assert key_store(make_settings(url="kafka://host:1", encryption_keys=[MASTER])).verdict is Verdict.WARNING
    lost = run(old, "rewrap")
    assert (lost.returncode, "not among log.encryption_keys" in lost.stdout) == (1, True)
    refused = run(make_settings(url=sqlite.log.url), "rewrap")
    assert (refused.returncode, "log.encryption_keys" in refused.stderr) == (2, True)


@pytest.mark.long
def test_keys_in_postgresql_outlive_restarts_and_are_destroyed_for_good(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in postgres.environ.items():
        monkeypatch.setenv(name, value)
    store = KeyStore(postgres.url, timeout_s=5.0)
    assert store.destroy("a") == 0  # before there is a table
    sealed = {tenant: TenantKeys(store, [MASTER]).encrypt(tenant, b"text") for tenant in ("a", "b")}
    (row,) = store.of_tenant("a")
    assert row.wrapped is not None
    assert _is_on_disk(postgres, row.wrapped)
    assert store.destroy("a") == 1
    assert not _is_on_disk(postgres, row.wrapped)
    again = TenantKeys(KeyStore(postgres.url), [MASTER])
    assert again.decrypt(*sealed["b"]) == b"text"
    with pytest.raises(RecordForgotten):
        again.decrypt(*sealed["a"])
    assert again.rewrap() == (1, 0)
    assert TenantKeys(store, [MASTER]).decrypt(*sealed["b"]) == b"text"


def _is_on_disk(postgres: Postgres, value: bytes) -> bool:
    """Whether a file of the database has these bytes, after all that is only in memory was written."""
    engine = sqlalchemy.create_engine(postgres.url, isolation_level="AUTOCOMMIT")
    with closing(engine.connect()) as connection:
        connection.execute(sqlalchemy.text("CHECKPOINT"))
    engine.dispose()
    held = [path for path in (postgres.folder / "data" / "base").rglob("*") if path.is_file()]
    return any(value in path.read_bytes() for path in held)
