"""The fleet's memory in snapshots: the same after a kill, linked while it does not change, encrypted as the log is, and
without what is too old or forgotten."""

import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest

from omnidraft.bus.encryption import new_key
from omnidraft.bus.key_store import KeyStore
from omnidraft.bus.tenant_keys import TenantKeys
from omnidraft.config import MemorySettings
from omnidraft.distill.forgetting import RecordRetention
from omnidraft.distill.memory.memory_files import MemoryFiles
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.errors import ConfigError
from omnidraft.fleet.forget_orders import affected_snapshots, purge
from omnidraft.memory.memory_file import MemoryFile
from omnidraft.snapshots.bundle import MEMORY, key_id_of
from omnidraft.telemetry.metrics import CountingMetrics
from tests.distiller_runs import Killed, Setting, names, run_until_idle
from tests.snapshot_folders import version_folder

MASTER = new_key()
NOW_MS = time.time_ns() // 1_000_000
SMALL = MemorySettings(tokens_per_tenant=60, total_tokens=100, max_tenants=2)


@pytest.fixture
def setting(pair, tmp_path: Path) -> Setting:
    return Setting(pair, tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(f"sqlite:///{tmp_path}/keys.db", timeout_s=0.1)


def keys(store: KeyStore) -> TenantKeys:
    return TenantKeys(store, [MASTER])


def emit(setting: Setting, *tenants: str, num: int = 4, start: int = 0, time_ms: int = NOW_MS) -> None:
    """In turn."""
    for name in names(num, start):
        for tenant in tenants:
            setting.emit(f"{name}-{tenant}", tenant=tenant, time_ms=time_ms)


def run(setting: Setting, **options: object) -> CountingMetrics:
    metrics = CountingMetrics()
    distillation, _ = setting.distiller(metrics=metrics, **options)
    run_until_idle(distillation)
    return metrics


def memory_folder(setting: Setting, version: int | None = None) -> Path:
    number = version or setting.registry.resolve("latest").version
    return version_folder(setting.folder / "registry", number) / "snapshot" / MEMORY


def contents(setting: Setting) -> dict[str, bytes]:
    """The files in the newest snapshot."""
    return {path.name: path.read_bytes() for path in sorted(memory_folder(setting).glob("*"))}


def tenants(setting: Setting, cipher: TenantKeys | None = None) -> dict[str, int]:
    """Owner -> number of tokens in the newest snapshot."""
    plain = [
        content if cipher is None else cipher.decrypt(key_id_of(name) or "", content)
        for name, content in contents(setting).items()
    ]
    return {file.owner.name: file.num_tokens for file in map(MemoryFile, plain)}


def test_a_snapshot_has_one_file_for_each_tenant_that_was_learned_from(setting):
    emit(setting, "alice", "bob", num=6)
    metrics = run(setting, held_out_every=3)
    held = tenants(setting)
    assert held.keys() == {"alice", "bob"}
    assert not any(owner in name for name in contents(setting) for owner in held)
    assert metrics.value("omnidraft_memory_tokens") == sum(held.values())
    assert metrics.value("omnidraft_memory_tenants") == 2
    assert set(contents(setting)) == {name.removeprefix(MEMORY) for name in setting.manifest().sha256 if MEMORY in name}


def test_held_out_requests_are_not_in_the_memory(setting):
    emit(setting, "a", num=12)
    run(setting, held_out_every=2)
    (content,) = contents(setting).values()
    counts = setting.manifest().counts
    assert counts["held_out"] > 0
    assert len(MemoryFile(content).texts()) == setting.manifest().num_records


@pytest.mark.parametrize(("die_after", "is_small"), [(0, True), (3, False), (6, True)])
def test_a_killed_and_resumed_run_makes_the_same_memory_to_the_byte(pair, tmp_path, die_after, is_small):
    whole, broken = (Setting(pair, tmp_path / name) for name in ("whole", "broken"))
    options = {"held_out_every": 4, "memory": SMALL if is_small else MemorySettings()}
    for each in (whole, broken):
        emit(each, "a", "b", "c", num=7)
    run(whole, **options)
    dying, _ = broken.distiller(die_after=die_after, **options)
    with suppress(Killed):
        run_until_idle(dying)
    run(broken, **options)
    assert contents(whole)
    assert contents(broken) == contents(whole)


def test_a_file_that_did_not_change_is_the_same_file_in_the_next_snapshots_and_after_a_restart(setting):
    emit(setting, "a", num=4)
    run(setting)
    first = setting.registry.resolve("latest")
    emit(setting, "b", num=4, start=100)
    run(setting)
    second = setting.registry.resolve("latest")
    assert second.version > first.version
    (name,) = [name for name in first.manifest.sha256 if name.startswith(MEMORY)]
    assert second.manifest.sha256[name] == first.manifest.sha256[name]
    one, other = (memory_folder(setting, each.version) / Path(name).name for each in (first, second))
    assert os.path.samefile(one, other)
    assert len(contents(setting)) == 2


def test_staged_files_that_something_else_deleted_are_written_anew(setting, tmp_path):
    texts = TextMemory(MemorySettings(), vocabulary_size=len(setting.pair.target.vocabulary))
    texts.add(setting.record(f"r-{tenant}", tenant=tenant) for tenant in "ab")
    files = MemoryFiles(texts, tmp_path / "memory", CountingMetrics())
    before = {name: path.read_bytes() for name, path in files.stage().items()}
    shutil.rmtree(tmp_path / "memory")
    assert {name: path.read_bytes() for name, path in files.stage().items()} == before
    assert len(before) == 2


def test_plain_files_are_for_their_owner_alone(setting):
    emit(setting, "a")
    run(setting)
    (path,) = memory_folder(setting).glob("*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_only_the_newest_snapshots_and_the_champion_keep_their_memory(setting):
    emit(setting, "a", num=4)
    run(setting)
    champion = setting.registry.resolve("latest").version
    setting.registry.promote(champion)
    emit(setting, "a", num=12, start=100)
    run(setting)
    newest = setting.registry.resolve("latest").version
    with_memory = [number for number in range(1, newest + 1) if memory_folder(setting, number).is_dir()]
    assert with_memory == [champion, newest - 1, newest]


def test_an_order_to_forget_takes_the_tenants_file_out_of_the_next_snapshot(setting):
    emit(setting, "leaver", "stayer")
    run(setting)
    setting.registry.promote(setting.registry.resolve("latest").version)
    before = contents(setting)
    setting.forget("leaver", until_ms=NOW_MS)
    metrics = run(setting, control=setting.control())
    assert tenants(setting).keys() == {"stayer"}
    assert contents(setting).items() < before.items()
    assert metrics.value("omnidraft_memory_tokens_dropped_total", reason="forgotten") > 0
    staged = setting.folder / "staging" / "memory"
    assert sorted(path.name for path in staged.iterdir()) == sorted(contents(setting))
    newest = setting.registry.resolve("latest").version
    purge(setting.registry, affected_snapshots(setting.registry.versions(), {0: 0}, "order"), newest)
    assert [number for number in range(1, newest) if memory_folder(setting, number).is_dir()] == []


def test_what_is_older_than_the_logs_retention_leaves_the_memory(setting):
    emit(setting, "old", time_ms=NOW_MS - 7_200_000)
    emit(setting, "new", start=100)
    run(setting)
    assert tenants(setting).keys() == {"old", "new"}
    emit(setting, "new", start=200)
    metrics = run(setting, retention=RecordRetention(3600.0))
    assert tenants(setting).keys() == {"new"}
    assert metrics.value("omnidraft_memory_tokens_dropped_total", reason="expired") > 0


def test_with_keys_a_file_opens_with_its_tenants_key_alone(setting, store):
    emit(setting, "a", "b")
    run(setting, cipher=keys(store))
    assert tenants(setting, keys(store)).keys() == {"a", "b"}
    held = contents(setting)
    assert {key_id_of(name) for name in held} == {key.key_id for key in store.all_keys()}
    ids = MemoryFile(keys(store).decrypt(key_id_of(name := next(iter(held))) or "", held[name])).texts()[0].ids
    assert not any(ids[:4].astype("<u4").tobytes() in content for content in held.values())
    assert not any(name.encode() in content for content in held.values() for name in ("facts", "tenant"))


def test_a_resumed_run_with_encryption_has_the_same_texts_and_keeps_what_did_not_change(setting, store):
    emit(setting, "a")
    run(setting, cipher=keys(store))
    before, plain = contents(setting), tenants(setting, keys(store))
    emit(setting, "b", start=100)
    run(setting, cipher=keys(store))
    after = contents(setting)
    assert before.items() < after.items()
    assert plain.items() < tenants(setting, keys(store)).items()


def test_a_memory_whose_key_was_destroyed_is_gone_and_counted(setting, store):
    emit(setting, "a", "b")
    run(setting, cipher=keys(store))
    store.destroy("a")
    emit(setting, "b", start=100)
    metrics = run(setting, cipher=keys(store))
    assert metrics.value("omnidraft_memory_files_dropped_total", reason="forgotten") == 1
    assert tenants(setting, keys(store)).keys() == {"b"}


def test_a_memory_whose_key_is_not_known_keeps_the_learner_from_starting(setting, store):
    emit(setting, "a")
    run(setting, cipher=keys(store))
    distillation, _ = setting.distiller(cipher=TenantKeys(store, [new_key()]))
    with pytest.raises(ConfigError, match=r"encrypted memory.*log\.encryption_keys"):
        run_until_idle(distillation)


def test_a_plain_memory_is_encrypted_once_there_are_keys(setting, store):
    emit(setting, "a")
    run(setting)
    emit(setting, "b", start=100)
    run(setting, cipher=keys(store))
    assert all(key_id_of(name) for name in contents(setting))
    assert tenants(setting, keys(store)).keys() == {"a", "b"}


def test_a_group_whose_key_was_destroyed_for_one_of_its_tenants_gets_a_new_file_without_that_one(setting, store):
    options = {"memory": MemorySettings(groups={"a": "g", "b": "g"})}
    emit(setting, "a", "b")
    run(setting, cipher=keys(store), **options)
    distillation, _ = setting.distiller(cipher=keys(store), control=setting.control(), **options)
    with_both = tenants(setting, keys(store))
    emit(setting, "b", start=100)
    setting.forget("a", until_ms=NOW_MS)
    run_until_idle(distillation)
    assert tenants(setting, keys(store)).keys() == {"g"}
    (content,) = contents(setting).items()
    file = MemoryFile(keys(store).decrypt(key_id_of(content[0]) or "", content[1]))
    assert {text.tenant for text in file.texts()} == {"b"}
    assert with_both["g"] > 0


def test_a_groups_new_file_opens_although_its_key_was_destroyed_a_moment_after_it_was_used(setting, store):
    options = {"memory": MemorySettings(groups={"a": "g", "b": "g"})}
    cipher = TenantKeys(store, [MASTER], clock=lambda: 0.0)  # keeps what it looked up
    emit(setting, "a", "b")
    run(setting, cipher=cipher, **options)
    assert store.destroy("memory group g") == 1
    setting.forget("a", until_ms=NOW_MS)
    run(setting, cipher=cipher, control=setting.control(), **options)
    assert tenants(setting, keys(store)).keys() == {"g"}


def test_texts_from_before_a_tenant_was_forgotten_get_no_new_key(setting, store):
    """The keys are destroyed while the learner has the texts, and before it hears of the order."""
    options = {"memory": MemorySettings(groups={"a": "g", "b": "g"})}
    distillation, _ = setting.distiller(cipher=keys(store), **options)
    emit(setting, "a", "b")
    run_until_idle(distillation)
    assert tenants(setting, keys(store))["g"] > 0
    keys(store).encrypt("a", b"")
    assert store.destroy("a") > 0
    assert store.destroy("memory group g") == 1
    emit(setting, "a", "b", start=100)
    distillation, _ = setting.distiller(cipher=TenantKeys(store, [MASTER]), **options)
    run_until_idle(distillation)
    ((name, content),) = contents(setting).items()
    assert {text.tenant for text in MemoryFile(keys(store).decrypt(key_id_of(name) or "", content)).texts()} == {"b"}
