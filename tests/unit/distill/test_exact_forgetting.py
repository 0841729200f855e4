"""Weights forget a tenant: every file of the snapshot is bit for bit that of a run which never saw the tenant."""

from pathlib import Path

import pytest

from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.publisher import LEARNER
from omnidraft.distill.training.learner import Learner
from omnidraft.fleet.forget_orders import order_forgetting
from omnidraft.ports import Offsets, Rewind
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.testing.memory_log import MemoryReader
from tests.control_logs import control_over
from tests.distiller_runs import Killed, Setting, SlowReader, names, run_until_idle
from tests.snapshot_folders import publish_copy, version_folder

NOW_MS = 1_000_000
HELD = {"held_out_every": 4}
SAME = ("num_records", "num_steps", "num_tokens", "held_out_records", "agreement_after")
KINDS = {
    "full": {"replay_records": 2},
    "lora, head": {"train": "lora", "replay_records": 2, "head": True},
}


def emit(setting: Setting, num: int, *, first: int = 0, with_leaver: bool) -> None:
    """Two tenants in turn, each with so many records; alone the one who stays."""
    for stayer, leaver in zip(names(num, first), names(num, first + 500), strict=True):
        setting.emit(stayer, tenant="stayer", time_ms=NOW_MS)
        if with_leaver:
            setting.emit(leaver, tenant="leaver", time_ms=NOW_MS)


def run(setting: Setting, **options) -> None:
    run_until_idle(setting.distiller(**HELD, control=setting.control(), **options)[0], 40)


def first_offsets(setting: Setting) -> dict[int, int]:
    """Of the messages of the tenant who leaves."""
    partitions = enumerate(setting.log.topic("t"))
    found = {number: [each.offset for each in messages if b"leaver" in each.value] for number, messages in partitions}
    return {number: offsets[0] for number, offsets in found.items() if offsets}


def forget(setting: Setting, **changes) -> None:
    setting.forget("leaver", until_ms=NOW_MS, **{"first_offsets": first_offsets(setting)} | changes)


def content(manifest: Manifest) -> dict[str, object]:
    return dict(manifest.sha256) | {name: getattr(manifest, name) for name in SAME}


class Case:
    """A log of both tenants, learned; one of the tenant who stays; and, made when asked for, what the log of both gives
    whoever was ordered beforehand to forget the other."""

    def __init__(self, pair, folder: Path, before: int = 0, num: int = 16, **learner) -> None:
        self.both, self.alone, self.fresh = (
            Setting(pair, folder / name, partitions=2, **learner) for name in ("both", "alone", "fresh")
        )
        self.fresh.log = self.both.log
        for setting in (self.both, self.alone):
            if before:
                emit(setting, before, with_leaver=False)
                run(setting)
                setting.registry.promote(setting.registry.resolve("latest").version)  # so it keeps its optimizer
            emit(setting, num - before, first=before, with_leaver=setting is self.both)
            run(setting)
        self.num_versions = len(self.both.registry.versions())

    def check(self) -> None:
        forgotten, never_saw = self.both.manifest(), self.alone.manifest()
        assert content(forgotten) == content(never_saw)
        assert {name.partition("/")[0] for name in forgotten.sha256} == {"serving", "resume", "memory"}
        assert (forgotten.forgets, forgotten.catching_up_to) == (("order",), {})
        run(self.fresh)
        assert forgotten.offsets == self.fresh.manifest().offsets
        assert content(forgotten) == content(self.fresh.manifest())
        assert forgotten.counts == self.fresh.manifest().counts

    def after_order(self) -> tuple[Manifest, ...]:
        return tuple(each.manifest for each in self.both.registry.versions()[self.num_versions :])


@pytest.mark.parametrize("before", [0, 20], ids=["from the base drafter", "from a snapshot"])
@pytest.mark.parametrize("learner", KINDS.values(), ids=KINDS)
def test_every_file_is_that_of_a_run_which_never_saw_the_tenant(pair, tmp_path, learner, before) -> None:
    case = Case(pair, tmp_path, before, 60, **learner)
    assert case.both.manifest().sha256 != case.alone.manifest().sha256
    learned_to = case.both.manifest().offsets
    forget(case.both)
    run(case.both)
    case.check()
    first, *between, newest = case.after_order()
    assert first.parent_id == case.both.manifest("champion" if before else "1").snapshot_id
    assert all(each.catching_up_to == learned_to for each in (first, *between))
    assert newest.num_records > first.num_records


def test_where_the_snapshot_from_before_the_tenant_is_damaged_learning_goes_on_and_says_what_it_kept(
    pair, tmp_path, caplog
) -> None:
    case = Case(pair, tmp_path, 20, 60, **KINDS["full"])
    weights = version_folder(tmp_path / "both" / "registry", case.both.registry.resolve("champion").version)
    (weights / "snapshot" / bundle.DRAFTER).write_bytes(b"damaged")
    forget(case.both)
    run(case.both)
    assert "weights keep what they learned of 1 tenants: " in caplog.text
    assert case.both.manifest().forgets == ("order",)


@pytest.mark.parametrize("num_steps", [0, 1, 5], ids=lambda number: f"after {number} steps")
def test_killed_in_the_middle_it_goes_on_to_the_same_bits(pair, tmp_path, num_steps) -> None:
    case = Case(pair, tmp_path, **KINDS["full"])
    forget(case.both)
    with pytest.raises(Killed):
        run(case.both, die_after=num_steps)
    learned_to = case.both.manifest().catching_up_to
    assert learned_to
    run(case.both)
    case.check()
    assert [each.catching_up_to for each in case.after_order()[:-1]] == [learned_to] * (len(case.after_order()) - 1)


def test_killed_before_anything_is_published_it_begins_again(pair, tmp_path) -> None:
    case = Case(pair, tmp_path, **KINDS["full"])
    forget(case.both)

    class Dying:
        def __getattr__(self, name: str):
            return getattr(case.both.registry, name)

        def publish(self, folder: Path, parent: int | None):
            raise Killed

    with pytest.raises(Killed):
        run(case.both, registry=Dying())
    assert not case.after_order()
    run(case.both)
    case.check()


class Expired(SlowReader):
    """A log whose first messages are gone."""

    def __init__(self, setting: Setting, firsts: Offsets) -> None:
        super().__init__(setting.log, "t", 3)
        self.firsts = firsts

    def first_offsets(self) -> Offsets:
        return self.firsts

    def seek(self, offsets: Offsets) -> None:
        assert all(offsets.get(partition, 0) >= first for partition, first in self.firsts.items())
        super().seek(offsets)


def test_a_log_that_begins_where_the_snapshot_ends_suffices(pair, tmp_path) -> None:
    case = Case(pair, tmp_path, 6, **KINDS["full"])
    start = case.both.manifest("champion")
    forget(case.both)
    run(case.both, reader=Expired(case.both, start.offsets))
    assert content(case.both.manifest()) == content(case.alone.manifest())


def test_without_the_log_since_a_snapshot_from_before_the_tenant_weights_keep_what_they_learned(pair, tmp_path) -> None:
    case = Case(pair, tmp_path, 6, **KINDS["full"])
    learned, gone = case.both.manifest(), case.both.manifest("champion").offsets
    forget(case.both)
    run(case.both, reader=Expired(case.both, {each: offset + 1 for each, offset in gone.items()}))
    (manifest,) = case.after_order()
    assert (manifest.forgets, manifest.catching_up_to, manifest.offsets) == (("order",), {}, learned.offsets)
    assert manifest.sha256[bundle.DRAFTER] == learned.sha256[bundle.DRAFTER]
    assert manifest.sha256[bundle.NGRAMS] != learned.sha256[bundle.NGRAMS]


def test_a_snapshot_that_learned_of_the_tenant_what_the_log_lost_since_is_none_to_start_from(pair, tmp_path) -> None:
    """By what the log still has, the tenant came after the champion."""
    case = Case(pair, tmp_path, **KINDS["full"])
    case.both.registry.promote(case.both.registry.resolve("latest").version)
    emit(case.both, 8, first=100, with_leaver=True)
    run(case.both)
    learned, gone = case.both.manifest(), case.both.manifest("champion").offsets
    forget(case.both, first_offsets=gone)
    run(case.both, reader=Expired(case.both, gone))
    assert case.both.manifest().sha256[bundle.DRAFTER] == learned.sha256[bundle.DRAFTER]
    assert not case.both.manifest().catching_up_to


def test_nobody_knows_whom_weights_learned_from_whose_resume_part_is_gone(pair, tmp_path) -> None:
    """The tenant's records are all from before such a snapshot, which an operator published."""
    setting = Setting(pair, tmp_path, replay_records=2)
    setting.emit(*names(6), tenant="leaver", time_ms=NOW_MS)
    setting.emit(*names(12, 100), tenant="stayer", time_ms=NOW_MS)
    run(setting)
    publish_copy(setting.registry, "3", tmp_path / "made")
    run(setting)
    setting.registry.promote(setting.registry.resolve("latest").version)
    setting.emit(*names(8, 200), tenant="stayer", time_ms=NOW_MS)
    run(setting)
    learned, gone = setting.manifest(), setting.manifest("champion").offsets
    setting.forget("leaver", until_ms=NOW_MS, first_offsets=gone)
    run(setting, reader=Expired(setting, gone))
    assert setting.manifest().forgets == ("order",)
    assert setting.manifest().offsets == learned.offsets
    assert not any(each.manifest.catching_up_to for each in setting.registry.versions())


def test_refusals_do_not_send_learning_back_to_a_champion_that_knows_the_tenant(pair, tmp_path) -> None:
    case = Case(pair, tmp_path, **KINDS["full"])
    knowing = case.both.registry.resolve("latest").version
    case.both.registry.promote(knowing)
    forget(case.both)
    run(case.both)
    order = Rewind(version=knowing, id=case.both.manifest().snapshot_id)
    control_over(case.both.log).put(("rewind",), order)
    run(case.both)
    case.check()


def test_two_tenants_are_forgotten_one_after_the_other_while_learning_catches_up(pair, tmp_path) -> None:
    case = Case(pair, tmp_path, **KINDS["full"])
    case.both.emit(*names(8, 900), tenant="later", time_ms=NOW_MS)
    run(case.both)
    learned_to = case.both.manifest().offsets
    forget(case.both)
    with pytest.raises(Killed):
        run(case.both, die_after=3)
    later = {each: offset - 4 for each, offset in learned_to.items()}
    case.both.forget("later", until_ms=NOW_MS, forget_id="second", first_offsets=later)
    run(case.both)
    assert content(case.both.manifest()) == content(case.alone.manifest())
    assert case.both.manifest().forgets == ("order", "second")
    second = next(each for each in case.after_order() if "second" in each.forgets)
    assert (second.catching_up_to, case.both.manifest().catching_up_to) == (learned_to, {})


@pytest.mark.parametrize("carried_out", [False, True], ids=["before it is carried out", "afterwards"])
def test_a_later_order_that_leaves_the_weights_alone_takes_nothing_of_an_exact_one_back(
    pair, tmp_path, carried_out
) -> None:
    """Nor does learning go back to a champion whose weights know the tenant."""
    case = Case(pair, tmp_path, **KINDS["full"])
    knowing = case.both.registry.resolve("latest").version
    case.both.registry.promote(knowing)
    control = control_over(case.both.log)
    exact = order_forgetting(control, "leaver", NOW_MS, first_offsets(case.both))
    if carried_out:
        run(case.both)
    num_versions = len(case.both.registry.versions())
    later = order_forgetting(control, "leaver", NOW_MS, {})
    run(case.both)
    assert case.both.manifest().forgets == (exact.id, later.id)
    since = case.both.registry.versions()[num_versions:]
    assert any(each.manifest.catching_up_to for each in since) != carried_out
    control.put(("rewind",), Rewind(version=knowing, id=case.both.manifest().snapshot_id))
    run(case.both)
    for file in (bundle.DRAFTER, LEARNER):
        assert case.both.manifest().sha256[file] == case.alone.manifest().sha256[file]


def keep_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "start_afresh_from", Learner.start_from)


def keep_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = TextMemory.restore
    monkeypatch.setattr(TextMemory, "restore", lambda self, texts: restore(self, texts) if texts else None)
    monkeypatch.setattr(TextMemory, "drop", lambda *args: None)


def keep_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batcher, "start_afresh", Batcher.start_at)


def begin_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    seek = MemoryReader.seek

    def past(self: MemoryReader, offsets: Offsets) -> None:
        seek(self, offsets or dict.fromkeys(self.partitions(), 1))

    monkeypatch.setattr(MemoryReader, "seek", past)


@pytest.mark.parametrize("plant", [keep_optimizer, keep_memory, keep_held_out, begin_one_later])
def test_what_is_kept_shows_in_the_files(pair, tmp_path, monkeypatch, plant) -> None:
    case = Case(pair, tmp_path, **KINDS["full"])
    forget(case.both)
    plant(monkeypatch)
    run(case.both)
    assert case.both.manifest().forgets == ("order",)
    assert case.both.manifest().sha256 != case.alone.manifest().sha256
