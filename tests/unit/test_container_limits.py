"""A process in a container reads its limits of processor time and memory, in both versions of control groups."""

import os
from pathlib import Path

import pytest

from omnidraft import system
from omnidraft.system import allowed_processors, container_memory, usable_processors

NUM_PROCESSORS = 8


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a container's limits, on a machine with eight processors."""
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(NUM_PROCESSORS)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "processors"),
    [
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("6400000 100000", NUM_PROCESSORS),
        ("max 100000", NUM_PROCESSORS),
        ("unreadable", NUM_PROCESSORS),
    ],
)
def test_threads_are_as_many_as_a_quota_allows(cgroup: Path, limit: str, processors: int) -> None:
    (cgroup / "cpu.max").write_text(f"{limit}\n")
    assert usable_processors() == processors


@pytest.mark.parametrize(("quota", "processors"), [("300000", 3), ("-1", NUM_PROCESSORS)])
def test_the_quota_of_version_1_counts_too(cgroup: Path, quota: str, processors: int) -> None:
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (cgroup / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_processors() == processors


def test_processors_are_named_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {130, 4, 9}, raising=False)
    assert allowed_processors() == [4, 9, 130]


def test_without_limits_all_processors_and_all_memory_are_there(cgroup: Path) -> None:
    assert usable_processors() == NUM_PROCESSORS
    assert container_memory() is None


def test_memory_in_use_does_not_count_cached_files(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("600000\n")
    (cgroup / "memory.stat").write_text("anon 500000\ninactive_file 50000\nactive_file 1000\n")
    assert container_memory() == 450_000
    (cgroup / "memory.max").write_text("max\n")
    assert container_memory() is None


def test_the_memory_of_version_1_counts_too(cgroup: Path) -> None:
    (cgroup / "memory").mkdir()
    limit = cgroup / "memory" / "memory.limit_in_bytes"
    limit.write_text("1000000\n")
    (cgroup / "memory" / "memory.usage_in_bytes").write_text("600000\n")
    (cgroup / "memory" / "memory.stat").write_text("inactive_file 1000\ntotal_inactive_file 50000\n")
    assert container_memory() == 450_000
    limit.write_text("9223372036854771712\n")
    assert container_memory() is None
