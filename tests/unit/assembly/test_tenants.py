"""Forgetting a tenant without all keys that the fleet has, and what is refused."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from omnidraft import config
from omnidraft.assembly import tenants
from omnidraft.assembly.logs import key_store, log_writer
from omnidraft.bus.encryption import new_key
from omnidraft.config import MemorySettings, Settings
from omnidraft.errors import RequestError
from omnidraft.ports import Outgoing
from omnidraft.traces import codec
from tests.cli_runs import run_cli
from tests.trace_records import make_record


@pytest.fixture
def fleet(tmp_path: Path) -> Settings:
    return config.load(None, {}, log={"url": f"sqlite:///{tmp_path}/log.db", "encryption_keys": [new_key()]})


@pytest.fixture
def keyless(fleet: Settings) -> Settings:
    return config.load(None, {}, log={"url": fleet.log.url})


def append(settings: Settings, *messages: Outgoing) -> None:
    with closing(log_writer(settings, settings.log.traces_topic)) as writer:
        writer.append(messages)


def append_record(settings: Settings, tenant: str) -> None:
    record = make_record(tenant, tenant=tenant)
    append(settings, Outgoing(codec.key(record), codec.encode(record), codec.headers(record), tenant=tenant))


def are_destroyed(settings: Settings) -> dict[str, bool]:
    store = key_store(settings)
    assert store is not None
    return {key.tenant: key.wrapped is None for key in store.all_keys()}


def rows(settings: Settings, tmp_path: Path) -> list[tuple[Any, ...]]:
    """All of the trace topic, as it is in the file."""
    with closing(sqlite3.connect(tmp_path / "log.db")) as database:
        query = "SELECT * FROM messages WHERE topic = ? ORDER BY partition, offset"
        return database.execute(query, [settings.log.traces_topic]).fetchall()


def test_nothing_is_forgotten_without_the_keys_and_nobodys_messages_are_touched(
    fleet: Settings, keyless: Settings, tmp_path: Path
) -> None:
    for tenant in ("a", "b"):
        append_record(fleet, tenant)
    headers = {"encryption": b"fernet", "encryption_key_id": b"of b"}
    append(keyless, Outgoing(b"b", b"..\x02a..", headers))  # the name as a record has it, by chance
    before, data = rows(fleet, tmp_path), tenants.tenant_data(keyless, "a")
    with pytest.raises(RequestError, match=r"3 messages are encrypted.*log\.encryption_keys"):
        tenants.forget(keyless, "a", data)
    tenants.forget(keyless, "a", data, accept_retention=True)
    assert rows(fleet, tmp_path) == before
    assert are_destroyed(fleet) == {"a": False, "b": False}


def test_the_command_says_what_it_destroyed(
    fleet: Settings,
    keyless: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    append_record(fleet, "a")
    command = ("tenants", "forget", "a", "--yes", "--accept-retention")
    said = []
    for settings in (keyless, fleet):
        keys = json.dumps([key.get_secret_value() for key in settings.log.encryption_keys])
        environ = {"OMNIDRAFT_LOG": fleet.log.url, "OMNIDRAFT_LOG__ENCRYPTION_KEYS": keys, "COLUMNS": "250"}
        done = run_cli(command, monkeypatch, capsys, environ)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert "0 keys and the content of 0 messages destroyed" in said[0]
    assert "1 encrypted messages that no key here opens stay" in said[0]
    assert "1 keys and the content of 1 messages destroyed" in said[1]
    assert "stay, unless" not in said[1]


def test_another_tenants_key_that_no_master_key_opens_holds_up_nobody(fleet: Settings) -> None:
    other = config.load(None, {}, log={"url": fleet.log.url, "encryption_keys": [new_key()]})
    append_record(fleet, "a")
    append_record(other, "b")
    data = tenants.tenant_data(fleet, "a")
    assert (data.num_keys, len(data.traces.positions), data.num_unopened) == (1, 1, 0)
    tenants.forget(fleet, "a", data)
    assert are_destroyed(fleet) == {"a": True, "b": False}


def test_the_name_of_a_groups_keys_is_no_tenant_to_forget(fleet: Settings) -> None:
    grouped = fleet.model_copy(update={"memory": MemorySettings(groups={"a": "g"})})
    append_record(fleet, "memory group g")  # as anybody may write who may write to the log
    data = tenants.tenant_data(grouped, "memory group g")
    with pytest.raises(RequestError, match=r"memory\.groups"):
        tenants.forget(grouped, "memory group g", data, accept_retention=True)
    assert are_destroyed(fleet) == {"memory group g": False}
    tenants.forget(fleet, "memory group g", data)
    assert are_destroyed(fleet) == {"memory group g": True}
