"""Keys of tenants: who opens what, what a destroyed key leaves, and a key store that does not answer."""

import sqlite3
from base64 import urlsafe_b64decode
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.bus.encryption import EncryptedReader, EncryptedWriter, new_key
from omnidraft.bus.key_store import KeyStore, StoredKey
from omnidraft.bus.tenant_keys import CACHE_S, MasterKeys, TenantKeys
from omnidraft.errors import KeyStoreError, RecordForgotten, UnknownKey
from omnidraft.ports import Message, Outgoing
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter

MASTER, OTHER_MASTER = new_key(), new_key()
PLAIN = b"what a user wrote"

Keys = Callable[..., TenantKeys]


class Clock:
    """Stands still until it is moved, or goes on by a step whenever it is read."""

    def __init__(self) -> None:
        self.now = self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(f"sqlite:///{tmp_path}/keys.db", timeout_s=0.1)


@pytest.fixture
def keys(store: KeyStore) -> Keys:
    """Those of a process of its own."""
    return lambda *masters, **options: TenantKeys(store, masters or (MASTER,), **options)


def written(
    log: MemoryLog, keys: TenantKeys | None, *messages: Outgoing, sealed: tuple[str, ...] = ()
) -> list[Message]:
    EncryptedWriter(MemoryWriter(log, "t"), [MASTER], sealed_prefixes=sealed, tenant_keys=keys).append(messages)
    return list(log.topic("t")[0])


def read(log: MemoryLog, keys: TenantKeys | None) -> list[Message]:
    return list(EncryptedReader(MemoryReader(log, "t"), [MASTER], tenant_keys=keys).poll(100, 0).messages)


def of(tenant: str | None, value: bytes = PLAIN, **headers: bytes) -> Outgoing:
    return Outgoing(b"k", value, headers, tenant=tenant)


@settings(max_examples=20)
@given(tenant=st.text(max_size=40), plain=st.binary(max_size=500))
def test_what_was_encrypted_for_a_tenant_any_process_with_the_master_key_reads(tmp_path_factory, tenant, plain):
    url = f"sqlite:///{tmp_path_factory.mktemp('keys')}/keys.db"
    key_id, token = TenantKeys(KeyStore(url), [MASTER]).encrypt(tenant, plain)
    assert TenantKeys(KeyStore(url), [OTHER_MASTER, MASTER]).decrypt(key_id, token) == plain
    assert len(plain) < 8 or plain not in token


def test_a_tenants_key_opens_nothing_of_another(keys: Keys):
    mine, yours = keys().encrypt("mine", PLAIN), keys().encrypt("yours", PLAIN)
    assert mine[0] != yours[0]
    with pytest.raises(UnknownKey):
        keys().decrypt(yours[0], mine[1])


def test_rows_that_were_exchanged_in_the_store_open_nothing(keys: Keys, tmp_path: Path):
    mine, yours = keys().encrypt("mine", PLAIN), keys().encrypt("yours", PLAIN)
    with sqlite3.connect(tmp_path / "keys.db") as database:
        wrapped = dict(database.execute("SELECT key_id, wrapped FROM omnidraft_tenant_keys"))
        for one, other in [(mine[0], yours[0]), (yours[0], mine[0])]:
            database.execute("UPDATE omnidraft_tenant_keys SET wrapped = ? WHERE key_id = ?", (wrapped[one], other))
    for key_id, token in (mine, yours):
        with pytest.raises(UnknownKey):
            keys().decrypt(key_id, token)


def test_without_a_store_everything_has_the_master_keys_and_a_store_that_comes_later_reads_it(keys: Keys):
    key_id, token = MasterKeys([MASTER]).encrypt("team-a", PLAIN)
    assert PLAIN not in token
    for cipher in (MasterKeys([OTHER_MASTER, MASTER]), keys(OTHER_MASTER, MASTER)):
        assert cipher.decrypt(key_id, token) == PLAIN
    for cipher in (MasterKeys([OTHER_MASTER]), keys(OTHER_MASTER)):
        with pytest.raises(UnknownKey, match="was changed, or encrypted with"):
            cipher.decrypt(key_id, token)
    with pytest.raises(UnknownKey, match=r"log\.key_store names none"):
        MasterKeys([MASTER]).decrypt(*keys().encrypt("team-a", PLAIN))


def test_what_was_changed_anywhere_or_cut_off_opens_nothing():
    key_id, token = MasterKeys([MASTER]).encrypt("team-a", PLAIN)
    for at in range(len(token)):
        for harmed in (token[:at], token[:at] + bytes([token[at] ^ 1]) + token[at + 1 :]):
            with pytest.raises(UnknownKey):
                MasterKeys([MASTER]).decrypt(key_id, harmed)


def test_the_store_keeps_keys_wrapped_and_to_its_owner(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = new_key().encode()
    monkeypatch.setattr(Fernet, "generate_key", lambda: key)
    keys().current("mine")
    assert (tmp_path / "keys.db").stat().st_mode & 0o077 == 0
    with pytest.raises(UnknownKey):
        keys(OTHER_MASTER).cipher(keys().current("mine")[0])
    assert not any(form in path.read_bytes() for path in tmp_path.iterdir() for form in (key, urlsafe_b64decode(key)))


def test_a_tenant_keeps_its_key_over_processes_and_gets_one_for_other_master_keys(keys: Keys):
    key_id = keys().current("mine")[0]
    assert keys().current("mine")[0] == key_id
    other = keys(OTHER_MASTER).current("mine")[0]
    assert other != key_id
    assert keys(MASTER).current("mine")[0] == key_id


def test_a_destroyed_key_stays_destroyed_and_leaves_no_byte(keys: Keys, store: KeyStore, tmp_path: Path):
    key_id, token = keys().encrypt("mine", PLAIN)
    wrapped = store.get([key_id])[key_id].wrapped
    assert wrapped is not None
    assert wrapped in (tmp_path / "keys.db").read_bytes()
    assert (store.destroy("mine"), store.destroy("mine")) == (1, 0)
    assert [path.name for path in tmp_path.iterdir() if wrapped in path.read_bytes()] == []
    again = KeyStore(f"sqlite:///{tmp_path}/keys.db")
    assert again.get([key_id])[key_id] == StoredKey(key_id, "mine", None)
    for _ in range(2):
        with pytest.raises(RecordForgotten):
            keys().decrypt(key_id, token)
    assert keys().current("mine")[0] != key_id


@pytest.mark.parametrize("is_cleared", [False, True], ids=["within seconds", "when it clears its cache"])
def test_a_process_stops_using_a_destroyed_key(keys: Keys, store: KeyStore, is_cleared: bool):
    clock = Clock()
    process = keys(clock=clock)
    key_id, token = process.encrypt("mine", PLAIN)
    store.destroy("mine")
    assert process.encrypt("mine", PLAIN)[0] == key_id
    if is_cleared:
        process.clear_cache()
    else:
        clock.now += CACHE_S + 1
    assert process.encrypt("mine", PLAIN)[0] != key_id
    with pytest.raises(RecordForgotten):
        process.decrypt(key_id, token)


def test_a_key_may_leave_the_cache_at_any_moment(keys: Keys):
    clock = Clock()
    process = keys(clock=clock)
    key_id, token = process.encrypt("mine", PLAIN)
    clock.step = CACHE_S / 7
    assert [process.decrypt(key_id, token) for _ in range(50)] == [PLAIN] * 50


def test_rewrapped_keys_need_only_the_new_master_key(keys: Keys, store: KeyStore):
    sealed = [keys().encrypt(tenant, PLAIN) for tenant in ("mine", "yours")]
    keys().encrypt("gone", PLAIN)
    store.destroy("gone")
    lost = new_key()
    keys(lost).encrypt("closed", PLAIN)
    assert keys(OTHER_MASTER, MASTER).rewrap() == (2, 1)
    assert [keys(OTHER_MASTER).decrypt(*each) for each in sealed] == [PLAIN, PLAIN]
    with pytest.raises(UnknownKey):
        keys(MASTER).decrypt(*sealed[0])
    assert [key.wrapped for key in store.of_tenant("gone")] == [None]


def test_messages_carry_an_opaque_id_and_their_copies_get_the_same_key(keys: Keys):
    log = MemoryLog()
    (message,) = written(log, keys(), of("team-a", schema=b"x"))
    assert message.headers == {
        "schema": b"x",
        "encryption": b"fernet",
        "encryption_key_id": message.headers["encryption_key_id"],
    }
    assert not any(b"team" in part for part in (message.value, *message.headers.values()))
    (plain,) = read(log, keys())
    assert (plain.value, "encryption" in plain.headers) == (PLAIN, False)
    copied = Outgoing(plain.key, plain.value, plain.headers)
    assert written(log, keys(), copied)[1].headers == message.headers


def test_what_belongs_to_nobody_and_what_older_versions_wrote_opens_with_the_master_key(keys: Keys):
    log = MemoryLog()
    older = written(log, None, of("team-a"))[0]
    newer = written(log, keys(), of(None))[1]
    assert older.headers == newer.headers == {"encryption": b"fernet"}
    assert [message.value for message in read(log, keys())] == [PLAIN, PLAIN]


@pytest.mark.parametrize("named", [b"\0", b"none", b"\xff" * 40, b"A" * 32, b""])
def test_what_is_no_id_of_a_key_is_not_asked_for(
    named: bytes, keys: Keys, store: KeyStore, monkeypatch: pytest.MonkeyPatch
):
    """PostgreSQL refuses a text with a zero byte, which would stop every reader."""
    log, asked = MemoryLog(), list[str]()
    written(log, keys(), of("team-a"), of(None, encryption_key_id=named))
    MemoryWriter(log, "t").append([of(None, b"x", encryption=b"fernet", encryption_key_id=named)])
    get = KeyStore.get
    monkeypatch.setattr(KeyStore, "get", lambda self, ids: asked.extend(ids) or get(self, ids))
    assert [message.value for message in read(log, keys())] == [PLAIN, PLAIN, b"x"]
    assert asked == [store.of_tenant("team-a")[0].key_id]


def test_messages_of_a_destroyed_key_come_back_empty_and_say_so(keys: Keys, store: KeyStore):
    log = MemoryLog()
    written(log, keys(), of("team-a", target=b"big", error=PLAIN), of("team-b"), sealed=("error",))
    kept_by_reader = read(log, keys())[0]
    store.destroy("team-a")
    gone, other = read(log, keys())
    assert (gone.value, gone.headers["forgotten"], gone.headers["target"]) == (b"", b"1", b"big")
    assert {"encryption", "sealed.error", "error"}.isdisjoint(gone.headers)
    assert other.value == PLAIN
    written(log, keys(), Outgoing(kept_by_reader.key, kept_by_reader.value, kept_by_reader.headers))
    assert log.topic("t")[0][2].value == b""


def test_a_reader_waits_for_the_key_store_and_skips_nothing(keys: Keys, tmp_path: Path):
    log = MemoryLog()
    written(log, keys(), of("team-a", b"1"), of("team-b", b"2"))
    reader = EncryptedReader(MemoryReader(log, "t"), [MASTER], tenant_keys=keys())
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    for _ in range(3):
        with pytest.raises(KeyStoreError):
            reader.poll(10, 0)
    (tmp_path / "away.db").rename(tmp_path / "keys.db")
    assert [message.value for message in reader.poll(10, 0).messages] == [b"1", b"2"]
    assert reader.poll(10, 0).messages == ()


def test_a_reader_that_seeks_while_the_store_is_away_reads_from_there(keys: Keys, tmp_path: Path):
    log = MemoryLog()
    written(log, keys(), of("team-a", b"1"), of("team-b", b"2"))
    reader = EncryptedReader(MemoryReader(log, "t"), [MASTER], tenant_keys=keys())
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    with pytest.raises(KeyStoreError):
        reader.poll(10, 0)
    reader.seek({0: 1})
    (tmp_path / "away.db").rename(tmp_path / "keys.db")
    assert [message.value for message in reader.poll(10, 0).messages] == [b"2"]


def test_a_writer_writes_nothing_while_the_store_is_locked(keys: Keys, tmp_path: Path):
    log = MemoryLog()
    keys().current("team-a")
    with sqlite3.connect(tmp_path / "keys.db") as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(KeyStoreError):
            written(log, keys(), of("team-a"))
        database.rollback()
    assert list(log.topic("t")[0]) == []
    written(log, keys(), of("team-a"))
    assert [message.value for message in read(log, keys())] == [PLAIN]


def test_reading_creates_no_store(keys: Keys, tmp_path: Path):
    with pytest.raises(KeyStoreError):
        keys().cipher("ab" * 16)
    assert list(tmp_path.iterdir()) == []
