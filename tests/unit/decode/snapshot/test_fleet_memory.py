"""The fleet's memory in a worker: whose texts are drafted for whom, what is left out, and what is not read twice."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.bus.encryption import new_key
from omnidraft.bus.key_store import KeyStore
from omnidraft.bus.tenant_keys import TenantKeys
from omnidraft.decode.snapshot.fleet_memory import MemoryLoader, SnapshotMemory
from omnidraft.decode.snapshot.loading import fetch_for_serving
from omnidraft.decode.snapshot.tenant_rules import TenantRules
from omnidraft.errors import KeyStoreError, SnapshotCorrupt
from omnidraft.memory.memory_file import Owner, Owners, encode
from omnidraft.memory.recent_texts import MemoryText
from omnidraft.ports import ControlState, Entry, Forget, RecordCipher, SnapshotVersion
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.snapshots.bundle import MEMORY, WORKER_PARTS, encrypted_name, plain_name
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces.redaction import hash_of_tenant
from tests.memory_texts import text
from tests.snapshot_folders import manifest, version_folder

MASTER = new_key()
UNREADABLE = "omnidraft_memory_files_unreadable_total"


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(f"sqlite:///{tmp_path}/keys.db", timeout_s=0.1)


@pytest.fixture
def metrics() -> CountingMetrics:
    return CountingMetrics()


@pytest.fixture
def make_loader(metrics: CountingMetrics):
    def make(groups: dict[str, str] | None = None, **options: object) -> MemoryLoader:
        return MemoryLoader(Owners(groups or {}), metrics, target="big", **options)

    return make


def of(tenant: str, *ids: int, time_ms: int = 1) -> MemoryText:
    return text(len(ids), ids, tenant=tenant, time_ms=time_ms)


def snapshot(
    folder: Path, texts_of: dict[Owner, list[MemoryText]], cipher: RecordCipher | None = None, name: str = "s1"
) -> tuple[SnapshotVersion, Path]:
    """As a distiller makes it."""
    files: dict[str, Path] = {}
    for owner, texts in texts_of.items():
        content, file_name = encode(owner, texts), plain_name(owner.kind, owner.name)
        if cipher is not None:
            key_id, content = cipher.encrypt(owner.key_name, content)
            file_name = encrypted_name(owner.kind, key_id)
        files[MEMORY + file_name] = folder / f"{name}-{file_name}"
        files[MEMORY + file_name].write_bytes(content)
    written = bundle.write(folder / name, manifest(name), files)
    return SnapshotVersion(1, written, (), 0), folder / name


def continuation(memory: SnapshotMemory, tenant: str, *context: int) -> list[int] | None:
    """What the tenant is drafted after these ids; None: it has no memory."""
    index = memory(tenant)
    found = index and index.longest_match(context)
    return None if index is None else [token for token, _ in (found.continuations(9) if found else [])]


def tenant(name: str) -> Owner:
    return Owner("tenant", name)


def test_a_tenant_is_drafted_what_was_said_to_it_and_never_what_was_said_to_another(make_loader, tmp_path):
    texts = {tenant("a"): [of("a", 1, 2)], tenant("b"): [of("b", 1, 3)]}
    memory = make_loader().load(*snapshot(tmp_path, texts))
    assert [continuation(memory, name, 1) for name in "abc"] == [[2], [3], None]


@settings(max_examples=20)
@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 900), min_size=1, max_size=6), st.text())
def test_no_name_of_a_tenant_or_group_opens_anothers_memory(tmp_path_factory, id_of, asked):
    folder = tmp_path_factory.mktemp("memory")
    owners = [tenant(name) for name in id_of] + [Owner("group", name) for name in id_of]
    texts = {owner: [of(owner.name, 0, id_of[owner.name] + (owner.kind == "group"))] for owner in owners}
    version, at = snapshot(folder, texts)
    memory = MemoryLoader(Owners({}), CountingMetrics(), target="big").load(version, at)
    for name in {*id_of, asked}:
        assert continuation(memory, name, 0) == ([id_of[name]] if name in id_of else None)


def test_the_tenants_of_a_group_share_one_memory_where_worker_and_snapshot_say_so(make_loader, tmp_path):
    given_snapshot = snapshot(tmp_path, {Owner("group", "g"): [of("a", 1, 2), of("b", 3, 4)]})
    grouped = make_loader({"a": "g", "b": "g"}).load(*given_snapshot)
    assert [continuation(grouped, name, 3) for name in ("a", "b", "g")] == [[4], [4], None]
    alone = make_loader().load(*given_snapshot)
    assert [continuation(alone, name, 3) for name in ("a", "b", "g")] == [None, None, None]


def test_under_a_redactor_tenants_are_found_by_the_names_in_their_records(make_loader, tmp_path):
    hashed = hash_of_tenant("a")
    given_snapshot = snapshot(tmp_path, {tenant(hashed): [of(hashed, 1, 2)]})
    memory = make_loader(recorded_as=hash_of_tenant).load(*given_snapshot)
    assert [continuation(memory, name, 1) for name in ("a", hashed)] == [[2], None]
    nobody = make_loader(recorded_as=lambda name: None).load(*given_snapshot)
    assert continuation(nobody, hashed, 1) is None


def test_encrypted_files_open_with_the_keys_and_leave_nothing_readable(make_loader, tmp_path, store, monkeypatch):
    staged = tmp_path / "tmp"
    staged.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(staged))
    cipher = TenantKeys(store, [MASTER])
    given_snapshot = snapshot(tmp_path, {tenant("a"): [of("a", 1, 2)]}, cipher)
    memory = make_loader(cipher=TenantKeys(store, [MASTER])).load(*given_snapshot)
    assert continuation(memory, "a", 1) == [2]
    assert list(staged.iterdir()) == []


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_worker_without_the_keys_serves_without_that_memory_and_counts_it(
    make_loader, tmp_path, store, metrics, has_keys
):
    given_snapshot = snapshot(tmp_path, {tenant("a"): [of("a", 1, 2)]}, TenantKeys(store, [MASTER]))
    cipher = TenantKeys(store, [new_key()]) if has_keys else None
    assert make_loader(cipher=cipher).load(*given_snapshot)("a") is None
    assert metrics.value(UNREADABLE, reason="unknown_key", target="big") == 1


def test_a_memory_whose_key_is_destroyed_is_left_out_and_counted(make_loader, tmp_path, store, metrics):
    texts = {tenant("a"): [of("a", 1, 2)], tenant("b"): [of("b", 1, 2)]}
    given_snapshot = snapshot(tmp_path, texts, TenantKeys(store, [MASTER]))
    store.destroy("a")
    memory = make_loader(cipher=TenantKeys(store, [MASTER])).load(*given_snapshot)
    assert [continuation(memory, name, 1) for name in "ab"] == [None, [2]]
    assert metrics.value(UNREADABLE, reason="forgotten") == 1


def test_a_key_store_that_does_not_answer_is_waited_for(make_loader, tmp_path, store):
    given_snapshot = snapshot(tmp_path, {tenant("a"): [of("a", 1, 2)]}, TenantKeys(store, [MASTER]))
    loader = make_loader(cipher=TenantKeys(store, [MASTER]))
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    with pytest.raises(KeyStoreError):
        loader.load(*given_snapshot)
    (tmp_path / "away.db").rename(tmp_path / "keys.db")
    assert continuation(loader.load(*given_snapshot), "a", 1) == [2]


@pytest.mark.parametrize("content", [b"", b"no memory", encode(tenant("a"), [text()])[:-1]])
def test_a_file_that_is_no_memory_is_left_out_and_counted(make_loader, tmp_path, metrics, content):
    version, folder = snapshot(tmp_path, {tenant("b"): [of("b", 1, 2)]})
    (folder / MEMORY / plain_name("tenant", "a")).write_bytes(content)
    memory = make_loader().load(version, folder)
    assert [continuation(memory, name, 1) for name in "ab"] == [None, [2]]
    assert metrics.value(UNREADABLE, reason="damaged") == 1


def test_a_file_that_two_snapshots_have_is_read_once(make_loader, tmp_path):
    loader, texts = make_loader(), {tenant("a"): [of("a", 1, 2)]}
    first = loader.load(*snapshot(tmp_path, texts))
    second = loader.load(*snapshot(tmp_path, texts | {tenant("b"): [of("b", 1, 2)]}, name="s2"))
    assert first("a") is not None
    assert first("a") is second("a")
    assert first("b") is None


def test_from_an_order_on_nothing_is_drafted_that_its_tenant_said_before_whatever_serves(make_loader, tmp_path):
    group = Owner("group", "g")
    old = {tenant("a"): [of("a", 1, 2, time_ms=5)], group: [of("b", 1, 2, time_ms=5), of("c", 3, 4, time_ms=9)]}
    new = {tenant("a"): [of("a", 1, 7, time_ms=6)], group: [of("c", 3, 4, time_ms=9)]}
    rules = TenantRules()
    loader = make_loader({"b": "g", "c": "g"}, rules=rules)
    before = loader.load(*snapshot(tmp_path, old))
    assert continuation(before, "a", 1) == [2]
    keys = [("forget", name) for name in "ab"]
    rules.state = ControlState({key: Entry(key, Forget(id="order", until_ms=5), 0, 0) for key in keys})
    assert [continuation(before, name, 1) for name in "abc"] == [None, None, None]
    after = loader.load(*snapshot(tmp_path, new, name="s2"))
    assert [continuation(after, "a", 1), continuation(after, "c", 3)] == [[7], [4]]


def test_a_snapshot_without_a_memory_has_none(make_loader, tmp_path):
    loader = make_loader()
    assert loader.load(None, None)("a") is None
    assert loader.load(*snapshot(tmp_path, {}))("a") is None


def published(tmp_path: Path) -> tuple[DirectoryRegistry, int]:
    registry = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=2)
    _, folder = snapshot(tmp_path, {tenant("a"): [of("a", 1, 2)]})
    (tmp_path / "weights").write_bytes(b"w")
    parts = {name: folder / name for name in bundle.read_manifest(folder).sha256}
    bundle.write(tmp_path / "whole", manifest("s2"), parts | {"serving/x": tmp_path / "weights"})
    return registry, registry.publish(tmp_path / "whole", None).version


def test_a_version_that_lost_its_memory_is_fetched_without_it(make_loader, tmp_path):
    registry, version = published(tmp_path)
    resolved = registry.resolve(str(version))
    folder = fetch_for_serving(registry, version, tmp_path / "one")
    assert continuation(make_loader().load(resolved, folder), "a", 1) == [2]
    registry.remove_files(version, ("memory",))
    folder = fetch_for_serving(registry, version, tmp_path / "two")
    assert (folder / "serving" / "x").exists()
    assert make_loader().load(resolved, folder)("a") is None


def test_a_memory_that_is_not_the_one_of_its_manifest_is_left_out_and_told_and_the_weights_serve(tmp_path, caplog):
    registry, version = published(tmp_path)
    (path,) = (version_folder(tmp_path / "registry", version) / "snapshot" / MEMORY).iterdir()
    path.unlink()
    path.write_bytes(b"another")
    with pytest.raises(SnapshotCorrupt):
        registry.fetch(version, tmp_path / "one", WORKER_PARTS)
    folder = fetch_for_serving(registry, version, tmp_path / "two")
    assert (folder / "serving" / "x").exists()
    assert not (folder / MEMORY).exists()
    assert f"version {version} is used without its memory" in caplog.text


def test_a_version_whose_weights_are_damaged_is_never_fetched(tmp_path, caplog):
    registry, version = published(tmp_path)
    path = version_folder(tmp_path / "registry", version) / "snapshot" / "serving" / "x"
    path.unlink()
    path.write_bytes(b"another")
    with pytest.raises(SnapshotCorrupt):
        fetch_for_serving(registry, version, tmp_path / "one")
    assert "without its memory" not in caplog.text
