"""Which snapshots may hold something of a forgotten tenant, and what is deleted of them."""

import time
from pathlib import Path

import pytest

from omnidraft.errors import RegistryError, SnapshotNotFound
from omnidraft.fleet.forget_orders import affected_snapshots, order_forgetting, purge
from omnidraft.ports import Forget
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.testing.memory_log import MemoryLog
from tests.control_logs import control_over
from tests.silent_reader import SilentReader
from tests.snapshot_folders import make_bundle, manifest


@pytest.fixture
def registry(tmp_path: Path) -> DirectoryRegistry:
    """Five versions, the last of which was made after the order."""
    made = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=9)
    for number, offset in enumerate((0, 4, 8, 12)):
        made.publish(make_bundle(tmp_path / "made", f"s{number}", offsets={0: offset, 1: 2}), number or None)
    made.publish(make_bundle(tmp_path / "made", "s4", offsets={0: 12, 1: 2}, forgets=("order",)), 4)
    return made


def versions(affected) -> list[int]:
    return [each.version for each in affected.affected]


def test_versions_that_learned_the_first_record_are_affected_until_one_was_made_without(registry) -> None:
    found = affected_snapshots(registry.versions(), {0: 5, 1: 2}, "order")
    assert (versions(found), found.is_newest_clean) == ([3, 4], True)
    assert versions(affected_snapshots(registry.versions(), {0: 5}, "later")) == [3, 4, 5]
    assert not affected_snapshots(registry.versions(), {0: 5}, "later").is_newest_clean


def test_a_tenant_without_a_record_in_the_log_affects_none(registry) -> None:
    found = affected_snapshots(registry.versions(), {}, "order")
    assert versions(found) == []


def test_a_memory_from_before_the_order_goes_even_if_the_log_knows_no_record_of_the_tenant_any_more(
    registry, tmp_path: Path
) -> None:
    (tmp_path / "text").write_bytes(b"x")
    for number, forgets in ((5, ()), (6, ()), (7, ("later",))):
        name = f"s{number}"
        parts = {"memory/tenant-x.safetensors": tmp_path / "text", "serving/x": tmp_path / "text"}
        bundle.write(tmp_path / "made" / name, manifest(name, forgets=forgets), parts)
        registry.publish(tmp_path / "made" / name, number)
    registry.promote(6)
    found = affected_snapshots(registry.versions(), {}, "later")
    assert [each.version for each in found.with_private_parts] == [1, 2, 3, 4, 5, 6, 7]
    assert purge(registry, found, 8) == []
    registry.fetch(8, tmp_path / "look", ("memory",))
    for version in (6, 7):
        registry.fetch(version, tmp_path / "look", ("serving",))
        with pytest.raises(SnapshotNotFound):
            registry.fetch(version, tmp_path / "look", ("memory",))


def test_records_from_before_the_order_go_even_if_the_log_knows_none_of_the_tenant_any_more(
    registry, tmp_path: Path
) -> None:
    """The champion keeps its held-out and replayed records however old they are."""
    registry.promote(2)
    assert purge(registry, affected_snapshots(registry.versions(), {}, "order"), 5) == []
    registry.fetch(5, tmp_path / "look", ("serving", "resume"))
    for version in (1, 2, 3, 4):
        registry.fetch(version, tmp_path / "look", ("serving",))
        with pytest.raises(SnapshotNotFound):
            registry.fetch(version, tmp_path / "look", ("resume",))
    assert affected_snapshots(registry.versions(), {}, "order").with_private_parts == ()


def test_purging_keeps_the_champions_weights_and_the_newest_version(registry, tmp_path: Path) -> None:
    registry.promote(4)
    found = affected_snapshots(registry.versions(), {1: 0}, "order")
    assert versions(found) == [1, 2, 3, 4]
    assert purge(registry, found, 5) == [1, 2, 3]
    registry.fetch(4, tmp_path / "look", ("serving",))
    registry.fetch(5, tmp_path / "look", ("serving", "resume"))
    for version, part in ((3, "serving"), (4, "resume")):
        with pytest.raises(SnapshotNotFound):
            registry.fetch(version, tmp_path / "look", (part,))


def test_a_version_that_cannot_be_deleted_is_named_and_stops_no_other(registry, tmp_path: Path, monkeypatch) -> None:
    remove = registry.remove_files

    def refuse_the_second(version: int, parts) -> None:
        if version == 2:
            raise RegistryError("AccessDenied")
        remove(version, parts)

    monkeypatch.setattr(registry, "remove_files", refuse_the_second)
    found = affected_snapshots(registry.versions(), {1: 0}, "order")
    with pytest.raises(RegistryError, match=r"files of 1 of 4 versions.*version 2: AccessDenied"):
        purge(registry, found, 5)
    registry.fetch(2, tmp_path / "look", ("serving",))
    for version in (1, 3, 4):
        with pytest.raises(SnapshotNotFound):
            registry.fetch(version, tmp_path / "look", ("serving",))


def test_a_second_order_reaches_as_far_as_the_first_at_least_in_a_slow_log() -> None:
    log, later_ms = MemoryLog(), time.time_ns() // 10**6 + 3_600_000
    order_forgetting(control_over(log), "a", later_ms, {})
    second = order_forgetting(control_over(log, reader=lambda: SilentReader(log, "control", (0, 1))), "a", 0, {0: 7})
    order_forgetting(control_over(log), "b", 0, {})
    assert (
        control_over(log).read_whole().forget("a")
        == second
        == Forget(id=second.id, until_ms=later_ms, first_offsets={0: 7})
    )
