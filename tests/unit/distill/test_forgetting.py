"""What a learner keeps beside its weights: encrypted in snapshots, no longer than the retention, and nothing of tenants
who were forgotten."""

import time
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from omnidraft.audit.run import DiscardingWriter
from omnidraft.bus.encryption import new_key
from omnidraft.bus.key_store import KeyStore
from omnidraft.bus.tenant_keys import TenantKeys
from omnidraft.config import MemorySettings
from omnidraft.distill.control import TrainingControl
from omnidraft.distill.forgetting import MAX_NOTED, Forgetting, RecordRetention
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.distill.ingest.topic_scan import RecentRecords
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.distill.memory.memory_files import MemoryFiles
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.publisher import BATCHER, LEARNER
from omnidraft.distill.resume_encryption import decrypt_records, encrypt_records
from omnidraft.distill.resume_tensors import records_from_tensors, records_to_tensors, tensor_to_bytes
from omnidraft.distill.retrying import wait
from omnidraft.errors import BusError, ConfigError, KeyStoreError, RegistryError
from omnidraft.ports import Forget, Restart, Rewind
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.registry.manifest_export import MAX_TAG_CHARACTERS
from omnidraft.snapshots import bundle
from omnidraft.snapshots.bundle import MEMORY
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.threads import attentive
from tests.control_logs import control_over
from tests.distiller_runs import Killed, Setting, learned, names, run_until_idle, until_idle
from tests.silent_reader import SilentReader
from tests.snapshot_folders import manifest
from tests.trace_records import make_record

MASTER = new_key()
NOW_MS = time.time_ns() // 1_000_000
REPLAY = {"replay_records": 1}


@pytest.fixture
def setting(pair, tmp_path: Path) -> Setting:
    return Setting(pair, tmp_path, **REPLAY)


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(f"sqlite:///{tmp_path}/keys.db", timeout_s=0.1)


def keys(store: KeyStore) -> TenantKeys:
    """Those of a process of its own."""
    return TenantKeys(store, [MASTER])


def kept(setting: Setting, cipher: TenantKeys | None = None) -> dict[str, list[str]]:
    """Tenants of the records in the newest snapshot, by the place where they are."""
    places = {}
    for place, name in (("held_out.", BATCHER), ("replay.", LEARNER)):
        tensors, _ = decrypt_records(bundle.tensors(setting.fetched(), name), cipher)
        places[place] = sorted({record.tenant for record in records_from_tensors(place, tensors)})
    return places


def emit_both(setting: Setting, num: int = 12, start: int = 0) -> None:
    """In turn."""
    for leavers, stayers in zip(setting.names(num, start), setting.names(num, start + 100), strict=True):
        setting.emit(leavers, tenant="leaver", time_ms=NOW_MS)
        setting.emit(stayers, tenant="stayer", time_ms=NOW_MS)


def run(setting: Setting, **options):
    distillation, journal = setting.distiller(held_out_every=3, **options)
    run_until_idle(distillation)
    return distillation, journal


def test_records_in_snapshots_open_with_their_tenants_key_alone(setting, store):
    emit_both(setting)
    run(setting, cipher=keys(store))
    for name in (BATCHER, LEARNER):
        tensors = bundle.tensors(setting.fetched(), name)
        assert not any(b"leaver" in tensor_to_bytes(each.flatten().contiguous().view(-1)) for each in tensors.values())
    assert kept(setting, keys(store))["replay."] == ["leaver", "stayer"]
    assert kept(setting, keys(store))["held_out."]
    with pytest.raises(ConfigError, match=r"log\.encryption_keys"):
        kept(setting, TenantKeys(store, [new_key()]))
    with pytest.raises(ConfigError, match=r"log\.encryption_keys"):
        kept(setting)
    store.destroy("leaver")
    assert kept(setting, keys(store)) == {"held_out.": ["stayer"], "replay.": ["stayer"]}
    store.destroy("stayer")
    assert kept(setting, keys(store)) == {"held_out.": [], "replay.": []}


def test_a_resumed_run_with_encryption_equals_one_without(pair, tmp_path, store):
    batches = []
    for cipher in (None, keys(store)):
        setting = Setting(pair, tmp_path / str(len(batches)), **REPLAY)
        emit_both(setting, 8)
        first, _ = setting.distiller(held_out_every=3, cipher=cipher, die_after=3)
        with pytest.raises(Killed):
            run_until_idle(first)
        _, journal = run(setting, cipher=cipher)
        batches.append((journal.batches, setting.manifest().losses, kept(setting, cipher)))
    assert batches[0] == batches[1]


def test_a_learner_waits_for_the_key_store_when_it_starts(setting, store, tmp_path):
    emit_both(setting, 8)
    run(setting, cipher=keys(store))
    before = setting.manifest().num_records
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    setting.emit(*names(8, 200), tenant="stayer", time_ms=NOW_MS)
    distillation, _ = setting.distiller(held_out_every=3, cipher=keys(store))
    with pytest.raises(KeyStoreError):
        distillation.run(until_idle(20)(distillation))
    (tmp_path / "away.db").rename(tmp_path / "keys.db")
    run(setting, cipher=keys(store))
    assert setting.manifest().num_records > before
    assert kept(setting, keys(store))["replay."] == ["leaver", "stayer"]


def test_an_order_to_forget_reaches_held_out_replay_cache_and_what_is_read_later(setting):
    emit_both(setting)
    _, first = run(setting)
    leavers = [name for name in setting.names(12) if not is_held_out(setting.record(name), 3)]
    num_waiting = len(set(leavers) - set(learned(first)))
    with_leaver = bundle.ngrams(setting.fetched())["num_uses"].sum()
    setting.forget("leaver", until_ms=NOW_MS)
    setting.emit(*names(4, 300), tenant="leaver", time_ms=NOW_MS)  # came late
    setting.emit(*setting.names(6, 400), tenant="leaver", time_ms=NOW_MS + 1)  # came back
    _, journal = run(setting, control=setting.control())
    manifest = setting.manifest()
    assert manifest.forgets == ("order",)
    assert manifest.counts["forgotten"] == 4 + num_waiting
    assert {name for name in learned(journal) if name.startswith("request-30")} == set()
    assert {name for name in learned(journal) if name.startswith("request-40")} != set()
    records = [
        record
        for place, name in (("held_out.", BATCHER), ("replay.", LEARNER))
        for record in records_from_tensors(place, bundle.tensors(setting.fetched(), name))
    ]
    assert all(record.time_ms > NOW_MS for record in records if record.tenant == "leaver")
    assert "stayer" in {record.tenant for record in records}
    assert bundle.ngrams(setting.fetched())["num_uses"].sum() < with_leaver
    assert sum(manifest.offsets.values()) == manifest.num_records + sum(
        manifest.counts.get(name, 0) for name in ("held_out", "duplicate", "forgotten")
    )


def test_hundreds_of_orders_are_carried_out_together_and_never_again(setting):
    emit_both(setting, 6)
    orders = [f"{number:012x}" for number in range(300)]
    for order in orders:
        setting.forget(f"tenant-{order}", until_ms=NOW_MS, forget_id=order)
    run(setting)
    for _ in range(3):
        run(setting, control=setting.control())
    *before, newest = setting.registry.versions()
    assert newest.manifest.forgets == tuple(orders)
    assert all(each.manifest.forgets == () for each in before)


def no_memory(setting: Setting) -> MemoryFiles:
    return MemoryFiles(TextMemory(MemorySettings(), vocabulary_size=9), setting.folder / "memory", CountingMetrics())


def test_the_orders_that_a_manifest_notes_are_bounded(setting):
    """And fit into one tag of MLflow, with much else. The newest stay."""
    batcher = Batcher([0], records_per_step=2, held_out_every=0, held_out_records=0)
    learner, new_cache = setting.pair.learner(), setting.pair.cache
    parts = (RecordRetention(), batcher, learner, no_memory(setting), CountingMetrics())
    forgetting = Forgetting(*parts, new_cache=new_cache)
    ids = tuple(f"{number:012x}" for number in range(MAX_NOTED + 1))
    forgetting.mark_done({name: Forget(id=name, until_ms=1) for name in ids})
    noted = manifest("s1", **forgetting.manifest_fields())
    assert noted.forgets == ids[1:]
    assert len(noted.model_dump_json()) < 0.7 * MAX_TAG_CHARACTERS


def test_a_learner_that_goes_back_to_a_champion_from_before_the_order_forgets_again(setting):
    emit_both(setting)
    run(setting)
    setting.registry.promote(setting.registry.resolve("latest").version)
    with_leaver = bundle.ngrams(setting.fetched())
    emit_both(setting, start=500)
    run(setting)
    refused = setting.manifest().snapshot_id
    setting.forget("leaver", until_ms=NOW_MS)
    run(setting, control=setting.control())
    without_leaver, version = bundle.ngrams(setting.fetched()), setting.registry.resolve("champion").version
    control_over(setting.log).put(("rewind",), Rewind(version=version, id=refused))
    run(setting, control=setting.control())
    manifest = setting.manifest()
    assert (manifest.continues_id is not None, manifest.forgets) == (True, ("order",))
    assert manifest.parent_id == setting.manifest("champion").snapshot_id
    assert "leaver" not in kept(setting)["replay."] + kept(setting)["held_out."]
    after = bundle.ngrams(setting.fetched())
    assert all(np.array_equal(after[name], without_leaver[name]) for name in without_leaver | after)
    assert any(not np.array_equal(after[name], with_leaver[name]) for name in with_leaver)


def late_control(setting: Setting) -> TrainingControl:
    """A control log with orders whose first poll brings nothing, as Kafka's while a partition has no leader."""
    control_over(setting.log).put(("restart",), Restart(start="latest", id="old"))
    setting.forget("leaver", until_ms=NOW_MS)
    return TrainingControl(control_over(setting.log, reader=lambda: SilentReader(setting.log, "control", range(1))))


def test_orders_are_known_before_anything_is_read_although_the_control_log_answers_late(setting):
    emit_both(setting, 6)
    _, journal = run(setting, control=late_control(setting))
    assert learned(journal)  # the restart was meant for those who had learned something
    assert all(int(name[-3:]) >= 100 for name in learned(journal))
    assert setting.registry.resolve("1").manifest.forgets == ("order",)


def test_an_order_is_not_carried_out_while_the_trace_log_is_silent(setting):
    """Else the cache would be rebuilt of the records that came by then."""
    emit_both(setting, 6)
    batcher = Batcher([0], records_per_step=2, held_out_every=0, held_out_records=0)
    batcher.start_at({0: 12})
    reader, learner = SilentReader(setting.log, "t", range(2)), setting.pair.learner()

    def source_over(reader) -> TraceConsumer:
        return TraceConsumer(reader, DiscardingWriter(), None, CountingMetrics(), topic="t")

    before, new_cache = RecentRecords(lambda: reader, source_over, 16, idle_s=0).before, setting.pair.cache
    parts = (RecordRetention(), batcher, learner, no_memory(setting), CountingMetrics())
    forgetting = Forgetting(*parts, new_cache=new_cache, learned_records=before)
    cache = learner.cache
    for _ in range(2):
        with pytest.raises(BusError, match="gave nothing"):
            forgetting.rebuild_cache()
        assert learner.cache is cache
    forgetting.rebuild_cache()
    assert learner.cache is not cache


def test_the_retention_reaches_held_out_records_and_the_replay_buffer(setting):
    setting.emit(*names(12), tenant="old", time_ms=NOW_MS - 7_200_000)
    setting.emit(*names(12, 100), tenant="new", time_ms=NOW_MS)
    run(setting)
    assert kept(setting)["replay."] == ["new", "old"]
    setting.emit(*names(4, 200), tenant="new", time_ms=NOW_MS)
    run(setting, retention=RecordRetention(3600.0))
    assert kept(setting) == {"held_out.": ["new"], "replay.": ["new"]}


def test_what_a_tenant_said_before_it_was_forgotten_gets_no_new_key(store):
    """The keys are destroyed before the learner hears of it."""
    keys(store).encrypt("gone", b"")
    store.destroy("gone")
    later_ms = int(time.time() * 1000) + 60_000
    records = [
        make_record("a", tenant="gone"),
        make_record("b", tenant="stays"),
        make_record("c", tenant="gone", time_ms=later_ms),
    ]
    encrypted = encrypt_records(records_to_tensors("replay.", records), keys(store))
    decrypted, num_forgotten = decrypt_records(encrypted, keys(store))
    assert [each.request_id for each in records_from_tensors("replay.", decrypted)] == ["b", "c"]
    assert num_forgotten == 0


def test_what_a_tenant_says_after_it_was_forgotten_has_its_new_key(setting, store):
    """Although the process still knows the destroyed one."""
    emit_both(setting)
    run(setting, cipher=(cipher := keys(store)))
    store.destroy("leaver")
    setting.forget("leaver", until_ms=NOW_MS)
    setting.emit(*setting.names(6, 400), tenant="leaver", time_ms=NOW_MS + 600_000)
    run(setting, cipher=cipher, control=setting.control())
    assert kept(setting, keys(store))["replay."] == ["leaver", "stayer"]


def test_a_record_from_the_future_expires_nothing_and_neither_does_a_clock_that_is_ahead():
    retention = RecordRetention(3600.0, now_s=lambda: 10_000.0)
    assert retention.expired_before_ms(9_000_000) == 5_400_000
    assert retention.expired_before_ms(99_000_000) == 6_400_000


def test_a_clock_that_jumps_ahead_empties_neither_replay_buffer_nor_memory_where_nothing_is_held_out(setting):
    setting.emit(*names(8), tenant="stayer", time_ms=NOW_MS)
    run_until_idle(setting.distiller()[0])
    before = setting.registry.resolve("latest").version
    setting.emit(*names(4, 200), tenant="stayer", time_ms=NOW_MS)
    ahead = RecordRetention(3600.0, now_s=lambda: NOW_MS / 1000 + 2_592_000)
    run_until_idle(setting.distiller(retention=ahead)[0])
    assert setting.registry.resolve("latest").version > before
    assert kept(setting) == {"held_out.": [], "replay.": ["stayer"]}
    assert any(name.startswith(MEMORY) for name in setting.manifest().sha256)


class AwayRegistry(DirectoryRegistry):
    """It hangs, or is gone, when learned snapshots are published, until it is back."""

    def __init__(self, folder: Path, *, is_gone: bool) -> None:
        super().__init__(folder, "drafter", "target", keep_resume=2)
        self.is_gone, self.is_reached, self.is_back = is_gone, Event(), Event()

    def publish(self, bundle, parent):
        if parent is not None and not self.is_back.is_set():
            self.is_reached.set()
            if self.is_gone:
                raise RegistryError("gone")
            self.is_back.wait()
        return super().publish(bundle, parent)


def is_soon(reached, patience_s: float = 3.0) -> bool:
    until = time.monotonic() + patience_s
    while not reached() and time.monotonic() < until:
        time.sleep(0.02)
    return reached()


@pytest.mark.parametrize("is_gone", [False, True], ids=["hangs", "is gone"])
def test_a_tenant_is_forgotten_while_the_registry_hangs_or_is_gone(setting, is_gone):
    """At once in what the learner keeps, and in a snapshot when the registry is back."""
    registry = AwayRegistry(setting.folder / "registry", is_gone=is_gone)
    service = attentive(registry, lambda: distiller.meanwhile())
    distiller, learner = setting.distiller(registry=service, held_out_every=3, control=setting.control(), wait=wait)
    emit_both(setting)
    stop = Event()
    thread = Thread(target=distiller.run, args=(stop.is_set,))
    thread.start()
    try:
        assert registry.is_reached.wait(20)
        assert is_soon(lambda: any(record.tenant == "leaver" for record in learner.replayed()))
        setting.forget("leaver", until_ms=NOW_MS + 1000)
        assert is_soon(lambda: all(record.tenant == "stayer" for record in learner.replayed()))
        registry.is_back.set()
        assert is_soon(lambda: "order" in setting.manifest().forgets, 20)
    finally:
        registry.is_back.set()
        stop.set()
        thread.join(20)
    assert kept(setting) == {"held_out.": ["stayer"], "replay.": ["stayer"]}
