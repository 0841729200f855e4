"""Forgetting a tenant without the keys that the fleet has."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from omnidraft import config
from omnidraft.bus.encryption import new_key
from omnidraft.config import Settings
from omnidraft.errors import RequestError
from omnidraft.ports import Outgoing
from omnidraft.traces import codec
from omnidraft.wiring import tenants
from omnidraft.wiring.logs import key_store, log_writer
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


def rows(settings: Settings, tmp_path: Path) -> list[tuple[Any, ...]]:
    """All of the trace topic, as it is in the file."""
    with closing(sqlite3.connect(tmp_path / "log.db")) as database:
        query = "SELECT * FROM messages WHERE topic = ? ORDER BY partition, offset"
        return database.execute(query, [settings.log.traces_topic]).fetchall()


def test_nothing_is_forgotten_without_the_keys_and_nobodys_messages_are_touched(
    fleet: Settings, keyless: Settings, tmp_path: Path
) -> None:
    for tenant in ("a", "b"):
        record = make_record(tenant, tenant=tenant)
        append(fleet, Outgoing(codec.key(record), codec.encode(record), codec.headers(record), tenant=tenant))
    headers = {"encryption": b"fernet", "encryption_key_id": b"of b"}
    append(keyless, Outgoing(b"b", b"..\x02a..", headers))  # the name as a record has it, by chance
    before, data = rows(fleet, tmp_path), tenants.tenant_data(keyless, "a")
    with pytest.raises(RequestError, match=r"3 messages are encrypted.*log\.encryption_keys"):
        tenants.forget(keyless, "a", data)
    tenants.forget(keyless, "a", data, accept_retention=True)
    assert rows(fleet, tmp_path) == before
    store = key_store(fleet)
    assert store is not None
    assert [key.wrapped is None for key in store.of_tenant("a")] == [False]
