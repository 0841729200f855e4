"""Whatever the umask, nobody but its owner reads a file with users' text: log, archives, snapshots, registries."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from omnidraft import files
from omnidraft.bus.sqlite_log import SqliteWriter
from omnidraft.distill.ingest.poison_detector import PoisonDetector
from omnidraft.distill.resume_tensors import records_to_tensors
from omnidraft.ports import Outgoing
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.traces import archive
from tests.distiller_runs import Killed
from tests.snapshot_folders import manifest
from tests.trace_records import make_record

SECRET = "told-in-confidence"
RECORD = make_record(tenant=SECRET)


@pytest.fixture(autouse=True)
def _everybody_may_read() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(root: Path) -> list[str]:
    """Files below that hold the secret and that others may read or write; folders that keep others out do not count."""
    holding = [path for path in root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holding, "nothing was written"
    return [str(path.relative_to(root)) for path in holding if path.stat().st_mode & 0o077]


def secret_bundle(folder: Path) -> Path:
    parts = {
        "serving/ngrams.safetensors": {"keys": np.arange(3, dtype=np.uint32)},
        "resume/intake.safetensors": records_to_tensors("held_out.", [RECORD]),
        "resume/learner.safetensors": records_to_tensors("replay.", [RECORD]),
    }
    bundle.write(folder / "s1", manifest(), parts)
    return folder / "s1"


def test_the_log_of_one_machine(tmp_path: Path) -> None:
    writer = SqliteWriter(tmp_path / "folder" / "log.db", "traces")
    writer.append([Outgoing(b"key", SECRET.encode(), {})])
    written = sorted((tmp_path / "folder").iterdir())
    assert [path.name for path in written] == ["log.db", "log.db-shm", "log.db-wal"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600] * 3
    assert open_to_others(tmp_path) == []
    writer.close()


def test_archives_and_what_a_broken_write_leaves(tmp_path: Path) -> None:
    path, modes = tmp_path / "traces.avro", []

    def records():
        yield RECORD
        modes.extend(stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir())

    archive.write(path, records())
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_snapshots_keep_records_to_their_owner_and_weights_to_everybody(tmp_path: Path) -> None:
    secret_bundle(tmp_path)
    assert open_to_others(tmp_path) == []
    assert stat.S_IMODE((tmp_path / "s1" / bundle.NGRAMS).stat().st_mode) == 0o666


def test_a_copy_to_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _cannot_link)
    seen, whole = [], shutil.copyfileobj

    def watched(source: BinaryIO, destination: BinaryIO) -> None:
        seen.append(stat.S_IMODE(os.fstat(destination.fileno()).st_mode))
        whole(source, destination)

    monkeypatch.setattr(files.shutil, "copyfileobj", watched)
    files.link_folder(secret_bundle(tmp_path / "made"), tmp_path / "copied")
    assert open_to_others(tmp_path) == []
    assert seen.count(0o600) == 2


def _cannot_link(*args: object) -> None:
    raise OSError("another disk")


@pytest.mark.parametrize("links", [True, False])
def test_the_registry_of_folders_and_what_is_staged_from_it(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = secret_bundle(tmp_path / "made")
    if not links:
        monkeypatch.setattr(os, "link", _cannot_link)
    registry = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=2)
    version = registry.publish(source, None).version
    registry.fetch(version, tmp_path / "staged", ("serving", "resume"))
    assert open_to_others(tmp_path) == []


def test_what_a_server_sends_is_kept_to_oneself(tmp_path: Path) -> None:
    """MLflow's client writes what it downloads as it likes."""
    from omnidraft.registry import staging
    from omnidraft.snapshots.signing import UNSIGNED

    source = secret_bundle(tmp_path / "made")

    def download(part: str, destination: Path) -> None:
        shutil.copytree(source / part, destination / part, copy_function=shutil.copyfile)

    staging.stage(tmp_path / "staged", bundle.read_manifest(source), ["resume"], download, UNSIGNED)
    assert open_to_others(tmp_path) == []


def test_the_learners_journal(tmp_path: Path) -> None:
    with suppress(Killed), PoisonDetector(tmp_path / "trying.json", tries=3).trying([(0, 1)]):
        raise Killed
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600]
