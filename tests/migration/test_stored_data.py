"""Whatever an earlier release stored is read as that release read it: log, announcements, snapshots, archives."""

import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr

from omnidraft import config, wiring
from omnidraft.distill.ingest import dead_letters
from omnidraft.errors import OmnidraftError, SnapshotCorrupt, WireError
from omnidraft.fleet.control_log import parse_announcement
from omnidraft.ports import Message, Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.traces import archive, codec
from tests.migration.earlier_release import assert_extends, expected


def plain(value: Any) -> Any:
    """Return a record as the JSON data that the earlier release made of it."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value


def messages(settings: config.Settings, topic: str) -> list[Message]:
    """Return the whole topic, partition after partition."""
    reader = wiring.log_reader(settings, topic)
    reader.seek({})
    polled = list(iter(lambda: reader.poll(1000, timeout_s=0).messages, ()))
    reader.close()
    return sorted((each for batch in polled for each in batch), key=lambda each: (each.partition, each.offset))


def test_every_record_in_the_log_decodes_to_the_same_fields(deployment: config.Settings) -> None:
    stored = messages(deployment, deployment.log.traces_topic)
    rows = expected("records.json")
    assert len(stored) == len(rows)
    for message, row in zip(stored, rows, strict=True):
        place = (message.partition, message.offset, message.key.decode("latin-1"), message.timestamp_ms)
        assert place == (row["partition"], row["offset"], row["key"], row["timestamp_ms"])
        if "error" in row:
            with pytest.raises(OmnidraftError) as refused:
                codec.decode(message.value, message.headers)
            assert type(refused.value).__name__ == row["error"]
        else:
            record = plain(codec.decode(message.value, message.headers))
            assert_extends(record, row["record"])


def test_a_record_that_is_written_again_has_the_same_bytes(deployment: config.Settings) -> None:
    rows = expected("records.json")
    for message, row in zip(messages(deployment, deployment.log.traces_topic), rows, strict=True):
        if "record" in row:
            record = codec.decode(message.value, message.headers)
            assert codec.encode(record) == message.value
            assert (codec.headers(record), codec.key(record)) == (message.headers, message.key)


def test_an_encrypted_topic_is_read_with_its_key(deployment: config.Settings) -> None:
    sealed = expected("sealed.json")
    keys = tuple(SecretStr(key) for key in sealed["encryption_keys"])
    log = deployment.log.model_copy(update={"topic_prefix": "sealed", "partitions": 1, "encryption_keys": keys})
    stored = messages(deployment.model_copy(update={"log": log}), log.traces_topic)
    records = [codec.decode(message.value, message.headers) for message in stored]
    assert [[record.request_id, record.segment] for record in records] == sealed["records"]


def test_an_archive_of_records_is_read(deployment: config.Settings) -> None:
    rows = [row["record"] for row in expected("records.json") if "record" in row]
    records = [plain(record) for record in archive.read(Path("records.avro"))]
    assert len(records) == 3
    assert_extends(records, rows[:3])


def test_every_dead_letter_says_the_same(deployment: config.Settings) -> None:
    letters = list(dead_letters.read(wiring.log_reader(deployment, deployment.log.dead_letters_topic), idle_s=0))
    rows = expected("dead_letters.json")
    assert len(letters) == len(rows)
    for letter, row in zip(letters, rows, strict=True):
        headers = {name: value.decode("latin-1") for name, value in letter.original_headers.items()}
        assert list(letter.origin or ()) == row["origin"]
        assert headers == row["original_headers"]
        for name in ("reason", "error", "origin_topic", "num_messages"):
            assert getattr(letter, name) == row[name]
        assert row["value"] in (None, letter.message.value.decode("latin-1"))


def test_every_announcement_parses_to_the_same_fields(deployment: config.Settings) -> None:
    stored = messages(deployment, deployment.log.control_topic)
    rows = expected("announcements.json")
    assert [message.offset for message in stored] == [row["offset"] for row in rows]
    for message, row in zip(stored, rows, strict=True):
        if row["announcement"] is None:
            with pytest.raises(WireError):
                parse_announcement(message)
        else:
            assert_extends(plain(parse_announcement(message)), row["announcement"])


def restored_mlflow(settings: config.Settings, root: Path) -> config.Settings:
    """Return the settings of an MLflow store made from its SQL dump, with the artifacts that it names."""
    with sqlite3.connect(root / "mlflow.db") as connection:
        connection.executescript((root / "mlflow.sql").read_text().replace("@ROOT@", str(root)))
    for run, version in expected("mlflow_artifacts.json").items():
        (folder,) = (root / "registry").glob(f"*/{version}/snapshot")
        shutil.copytree(folder, root / run)
    section = settings.registry.model_copy(update={"url": f"sqlite:///{root}/mlflow.db"})
    return settings.model_copy(update={"registry": section})


@pytest.fixture(params=["directory", "mlflow"])
def opened(
    request: pytest.FixtureRequest, deployment: config.Settings, tmp_path: Path
) -> Iterator[tuple[Registry, list[dict[str, Any]]]]:
    """A registry, and what its versions were."""
    if request.param == "directory":
        yield wiring.registry(deployment), expected("versions.json")
    else:
        yield wiring.registry(restored_mlflow(deployment, tmp_path)), expected("mlflow_versions.json")


def plain_version(version: SnapshotVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "aliases": sorted(version.aliases),
        "created_ms": version.created_ms,
        "manifest": version.manifest.model_dump(mode="json"),
    }


def test_every_manifest_and_alias_is_the_same(opened: tuple[Registry, list[dict[str, Any]]]) -> None:
    registry, rows = opened
    versions = [plain_version(version) for version in registry.versions()]
    assert_extends(versions, rows)
    for row in rows:
        for alias in row["aliases"]:
            assert registry.resolve(alias).version == row["version"]
    assert registry.resolve("latest").version == rows[-1]["version"]


def test_every_snapshot_verifies_with_its_signature_and_loads(
    opened: tuple[Registry, list[dict[str, Any]]], tmp_path: Path
) -> None:
    registry, rows = opened
    for row in rows:
        folder = registry.fetch(row["version"], tmp_path / "fetched")
        manifest = bundle.verify(folder, ("serving",))
        assert manifest.snapshot_id == row["manifest"]["snapshot_id"]
        assert bundle.ngrams(folder)
        tensors = bundle.serving_tensors(folder)
        assert (tensors is None) == (manifest.train == "base")
    whole = registry.fetch(rows[-1]["version"], tmp_path / "whole", ("serving", "resume"))
    assert bundle.verify(whole, ("serving", "resume")).sha256 == rows[-1]["manifest"]["sha256"]


def test_a_manifest_with_the_sample_of_a_lagging_learner_keeps_it_under_its_signature(
    deployment: config.Settings,
) -> None:
    sampled = next(row for row in expected("versions.json") if row["manifest"]["lag_samples"])
    registry = wiring.registry(deployment)
    assert registry.resolve(str(sampled["version"])).manifest.signature == sampled["manifest"]["signature"]
    (path,) = Path("registry").glob(f"*/v{sampled['version']:06d}/snapshot/manifest.json")
    manifest = bundle.parse_manifest(path.read_bytes())
    assert_extends(manifest.model_dump(mode="json"), sampled["manifest"])
    path.write_text(path.read_text().replace('"num_kept": 9', '"num_kept": 8'))
    with pytest.raises(SnapshotCorrupt, match="changed"):
        registry.fetch(sampled["version"], Path("fetched"))
