"""The fleet's memory from settings: when it is off, under which names tenants are looked up, and which keys are
destroyed."""

from pathlib import Path

import pytest

from omnidraft import config
from omnidraft.assembly import tenants
from omnidraft.assembly.distiller import memory_files
from omnidraft.assembly.logs import key_store, log_writer
from omnidraft.assembly.models import TargetVocabulary
from omnidraft.assembly.snapshot_loading import memory_loader
from omnidraft.bus.encryption import new_key
from omnidraft.bus.tenant_keys import TenantKeys
from omnidraft.memory.memory_file import Owner
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces.redaction import hash_of_tenant
from tests.memory_texts import said
from tests.tiny_pair import Pair

KAFKA = {"url": "kafka://localhost:1", "encryption_keys": [new_key()]}


@pytest.mark.parametrize(
    ("log", "is_kept"),
    [
        ({}, True),
        (KAFKA, False),
        (KAFKA | {"key_store": "sqlite:///keys.db"}, True),
        ({"encryption_keys": [new_key()]}, True),
    ],
)
def test_a_memorys_files_are_encrypted_as_the_log_is_and_there_are_none_where_they_could_not_be(
    pair: Pair, tmp_path: Path, log: dict[str, object], is_kept: bool
):
    settings = config.load(None, {}, log=log)
    files = memory_files(settings, TargetVocabulary(tmp_path, pair.target), CountingMetrics(), tmp_path)
    files.memory.add([said("1", [1, 2, 3], tenant="a")])
    assert bool(files.memory.owners()) is is_kept
    assert (files.cipher is not None) is bool(settings.log.encryption_keys)


@pytest.mark.parametrize(
    ("redactor", "name"),
    [
        (None, "a"),
        ("omnidraft.traces.redaction:without_prompts", "a"),
        ("omnidraft.traces.redaction:hashed_tenant", hash_of_tenant("a")),
        ("my.own:redactor", None),
    ],
)
def test_a_worker_looks_tenants_up_as_records_name_them(redactor: str | None, name: str | None):
    settings = config.load(None, {}, recorder={"redactor": redactor})
    assert memory_loader(settings, CountingMetrics()).recorded_as("a") == name


def test_forgetting_a_tenant_destroys_its_keys_and_its_groups_and_nobody_elses(tmp_path: Path):
    log = {"url": f"sqlite:///{tmp_path}/log.db", "encryption_keys": [new_key()]}
    settings = config.load(None, {}, log=log, memory={"groups": {"a": "g", "b": "g", "c": "h"}})
    store = key_store(settings)
    assert store is not None
    names = ["a", "b", "c", Owner("group", "g").key_name, Owner("group", "h").key_name]
    keys = TenantKeys(store, [key.get_secret_value() for key in settings.log.encryption_keys])
    for name in names:
        keys.encrypt(name, b"")
    log_writer(settings, settings.log.traces_topic).close()
    tenants.forget(settings, "a", tenants.tenant_data(settings, "a"))
    destroyed = [name for name in names if store.of_tenant(name)[0].wrapped is None]
    assert destroyed == ["a", Owner("group", "g").key_name]
