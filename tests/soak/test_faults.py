"""The soak itself, small: a fleet that is killed keeps its promises, and each broken promise is detected."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from omnidraft import assembly
from omnidraft.bus.sqlite_log import SqliteWriter
from omnidraft.config import Settings
from omnidraft.distill.ingest import topic_scan
from omnidraft.files import sha256_of
from omnidraft.ports import Outgoing
from tests.cli_runs import run_pipeline
from tests.kafka_fixture import require_jars
from tests.soak import __main__, uninterrupted, verdict
from tests.soak.cluster import BROKER, REGISTRY, Cluster, tiny_settings
from tests.soak.faults import EVIDENCE

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(600)]

MINUTES = 0.5


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, omnidraft_home: Path) -> Iterator[Path]:
    """Return the folder of a fleet that was killed and judged."""
    require_jars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        out = tmp_path_factory.mktemp("soak")
        run_pipeline(__main__.main, "--parts", "faults", "--minutes", MINUTES, "--pace-s", 2, "--out", out)
        yield out


def test_a_fleet_that_is_killed_loses_nothing_repeats_nothing_and_learns_the_same_weights(killed: Path) -> None:
    report = json.loads((killed / "report.json").read_text())
    figures = report["parts"]["faults"]["figures"]
    assert report["broken"] == []
    names = ("acknowledged_lost", "learned_twice", "corrupt_served", "requests_failed")
    assert [report[name] for name in names] == [0, 0, 0, 0]
    assert sum(figures["faults_by_victim"].values()) == figures["num_faults"] > 0
    assert figures["tries"] >= figures["answers"] >= figures["acknowledged_by_name"] > 0
    assert figures["uninterrupted"]["records_learned"] > 0
    assert figures["uninterrupted"]["weights_equal_bit_for_bit"]


@pytest.fixture(scope="module")
def again(killed: Path) -> Iterator[Cluster]:
    """Start log and registry of that fleet, to be judged again."""
    with Cluster(killed / "faults", tiny_settings(killed / "models")) as cluster:
        cluster.bring_up(REGISTRY, BROKER)
        cluster.wait_until_ready(REGISTRY, BROKER)
        yield cluster


@pytest.fixture
def evidence(killed: Path) -> verdict.Evidence:
    return verdict.load(killed / "faults" / EVIDENCE)


def test_what_was_saved_is_judged_the_same(again: Cluster, evidence: verdict.Evidence, killed: Path) -> None:
    figures = json.loads((killed / "report.json").read_text())["parts"]["faults"]["figures"]
    judged = verdict.judge(again.settings, evidence)
    assert judged == {name: figures[name] for name in judged}


def test_an_acknowledged_record_that_is_not_in_the_log_is_lost(again: Cluster, evidence: verdict.Evidence) -> None:
    more = replace(evidence, acknowledged=evidence.acknowledged | {"never-sent"})
    assert verdict.judge(again.settings, more)["acknowledged_lost"] == 1
    counted = replace(evidence, num_acknowledged=evidence.num_acknowledged + 3)
    assert verdict.judge(again.settings, counted)["acknowledged_lost"] >= 1


def test_a_record_that_was_cut_out_of_the_log_is_lost(
    again: Cluster, evidence: verdict.Evidence, tmp_path: Path
) -> None:
    """In a copy of the log; the whole copy is clean."""
    copied = copy_of_log(again.settings, tmp_path / "log.db")
    assert verdict.judge(copied, evidence)["acknowledged_lost"] == 0
    topic = again.settings.log.traces_topic
    with sqlite3.connect(tmp_path / "log.db") as connection:
        connection.execute("DELETE FROM messages WHERE topic = ? AND offset = 2", (topic,))
    connection.close()
    judged = verdict.judge(copied, evidence)
    assert judged["acknowledged_lost"] >= 1
    assert any("the log lacks offsets 2 to 2" in fault for fault in judged["faults"])


def copy_of_log(settings: Settings, path: Path) -> Settings:
    """Settings with all topics in SQLite, which pass for those that were copied."""
    for topic in (settings.log.traces_topic, settings.log.dead_letters_topic):
        writer = SqliteWriter(path, topic)
        with closing(assembly.log_reader(settings, topic)) as reader:
            for message in topic_scan.messages(reader):
                writer.append([Outgoing(message.key, message.value, message.headers)])
            identity = reader.identity()
        writer.close()
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE topics SET id = ? WHERE topic = ?", (identity, topic))
    log = settings.log.model_copy(update={"url": f"sqlite:///{path}"})
    return settings.model_copy(update={"log": log})


def test_an_answer_that_is_not_plain_decodings_is_corrupt(again: Cluster, evidence: verdict.Evidence) -> None:
    prompt, reply = evidence.replies[0]
    wrong = replace(evidence, replies=[(prompt, replace(reply, text=reply.text + "!")), *evidence.replies[1:]])
    assert verdict.judge(again.settings, wrong)["corrupt_served"] == 1
    unknown = replace(evidence, replies=[(prompt, replace(reply, snapshot_id="nobody")), *evidence.replies[1:]])
    assert verdict.judge(again.settings, unknown)["corrupt_served"] == 1
    torn = replace(evidence, beginnings=[(prompt, reply.text[:3] + "!")])
    assert verdict.judge(again.settings, torn)["corrupt_served"] == 1


def test_a_run_that_learns_otherwise_has_other_weights(again: Cluster, tmp_path: Path) -> None:
    learner = again.settings.learner.model_copy(update={"learning_rate": 2e-3})
    compared = uninterrupted.compare(again.settings.model_copy(update={"learner": learner}), tmp_path)
    assert not compared["weights_equal_bit_for_bit"]
    assert compared["tensors_that_differ"]


def test_a_snapshot_whose_file_was_changed_is_corrupt(again: Cluster, evidence: verdict.Evidence) -> None:
    """The last test of this fleet: its registry is not whole afterwards."""
    served = [reply.snapshot_id for _, reply in evidence.replies]
    version = next(each for each in assembly.registry(again.settings).versions() if each.manifest.snapshot_id in served)
    checksums = {checksum for name, checksum in version.manifest.sha256.items() if name.startswith("serving/")}
    for path in stored(again.folder):
        if sha256_of(path) in checksums:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    num_corrupt = verdict.judge(again.settings, evidence)["corrupt_served"]
    assert num_corrupt >= served.count(version.manifest.snapshot_id) > 0


def stored(folder: Path) -> list[Path]:
    return list((folder / "artifacts").rglob("serving/*.safetensors"))
