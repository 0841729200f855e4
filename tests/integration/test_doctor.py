"""`omnidraft doctor` as one runs it, and its checks of a real Kafka broker and a real MLflow store."""

import json
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from omnidraft import assembly, config
from omnidraft.doctor import log, registry
from omnidraft.doctor.finding import Verdict
from omnidraft.ports import Outgoing
from tests.cli_runs import run_cli
from tests.snapshot_folders import make_bundle
from tests.tiny_engine import tiny_settings


@pytest.fixture
def doctor(
    settings_file: Path, omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Runs it with settings for the tiny pair."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))

    def run(*arguments: str, **environ: str) -> Any:
        return run_cli(("doctor", "--config", settings_file, *arguments), monkeypatch, capsys, environ)

    return run


def test_a_sound_fleet_has_no_problem_and_every_check_one_line(doctor, tiny_models, tmp_path: Path) -> None:
    done = doctor("--json")
    findings = json.loads(done.stdout)
    assert done.returncode == 0, findings
    assert not (tmp_path / "log.db").exists()
    checks = [each["check"] for each in findings]
    for name in (
        "settings",
        "python",
        "libraries",
        "kernels",
        "processor",
        "precision",
        "log",
        "memory",
        "worker port",
    ):
        assert checks.count(name) == 1
    assert all((each["advice"] is None) == (each["verdict"] == "ok") for each in findings)
    assert len(doctor().stdout.splitlines()) == len(findings)


def test_a_problem_is_one_line_says_what_to_do_and_makes_exit_code_1(doctor) -> None:
    done = doctor(OMNIDRAFT_LOG="kafka://127.0.0.1:9", OMNIDRAFT_LOG__REQUEST_TIMEOUT_S="1")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert done.returncode == 1
    assert "log: " in line
    assert "127.0.0.1:9" in line
    assert " -> start the log" in line


def test_settings_that_do_not_load_are_a_problem_and_what_needs_none_is_still_told(doctor) -> None:
    done = doctor("--json", OMNIDRAFT_DECODE__WIDHT="6")
    findings = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1
    assert list(findings) == ["settings", "python", "libraries"]
    assert "decode.widht" in findings["settings"]["told"]
    assert findings["settings"]["advice"]


def test_topics_of_a_broker_are_judged_by_their_size_retention_and_partitions(
    kafka_bootstrap: str, tiny_models: tuple[Path, Path]
) -> None:
    settings = tiny_settings(
        tiny_models,
        log={"url": f"kafka://{kafka_bootstrap}", "partitions": 2, "topic_prefix": f"doctor-{uuid.uuid4().hex}"},
    )
    name = settings.log.traces_topic
    assert assembly.topics(settings) == {}
    assert log.topic(settings, name).verdict is Verdict.WARNING
    with closing(assembly.log_writer(settings, name)) as writer:
        writer.append([Outgoing(str(number).encode(), b"value") for number in range(6)])
    facts = assembly.topics(settings)
    assert list(facts) == [name]
    assert (facts[name].num_partitions, facts[name].max_message_bytes) == (2, 2 << 20)
    assert facts[name].retention_ms == 7 * 24 * 3_600_000
    assert log.connection(settings).told.endswith("has 1 of 3 topics")
    assert log.topic(settings, name).verdict is Verdict.OK
    assert "old" in log.clocks(settings).told
    assert "in the future" in log.clocks(settings, now_ms=0).told
    seen = assembly.overview(settings, ["http://127.0.0.1:9"])
    assert seen.trace_ends is not None
    assert (sum(seen.trace_ends.values()), seen.targets[0].is_learning_paused) == (6, False)
    for topic, words in planted(settings).items():
        make_topic(kafka_bootstrap, topic, **{"retention.ms": "3600000"})
        found = log.topic(settings, topic)
        assert found.verdict is Verdict.WARNING, found
        assert "keeps messages for 1.0 hours" in found.told
        assert words in (found.advice or "")


def planted(settings: config.Settings) -> dict[str, str]:
    """Topics that keep messages for an hour, and the advice."""
    return {settings.log.dead_letters_topic: "raise retention.ms", settings.log.control_topic: "cleanup.policy"}


def make_topic(servers: str, topic: str, *, partitions: int = 1, **configs: str) -> None:
    from kafka import KafkaAdminClient

    with closing(KafkaAdminClient(bootstrap_servers=servers)) as admin:
        admin.create_topics({topic: {"num_partitions": partitions, "configs": configs}}, wait_for_metadata=True)


def test_a_topic_that_takes_small_messages_only_is_a_problem(
    kafka_bootstrap: str, tiny_models: tuple[Path, Path]
) -> None:
    prefix = f"doctor-{uuid.uuid4().hex}"
    settings = tiny_settings(tiny_models, log={"url": f"kafka://{kafka_bootstrap}", "topic_prefix": prefix})
    small = {"max.message.bytes": "10000", "message.timestamp.type": "LogAppendTime"}
    make_topic(kafka_bootstrap, settings.log.traces_topic, **small)
    found = log.topic(settings, settings.log.traces_topic)
    assert found.verdict is Verdict.PROBLEM
    assert "takes messages of 10,000 bytes" in found.told
    with closing(assembly.log_writer(settings, settings.log.traces_topic)) as writer:
        writer.append([Outgoing(b"key", b"value")])
    assert "by the log's clock" in log.clocks(settings).told


def test_a_mlflow_store_is_looked_at_and_never_made(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    settings = tiny_settings(tiny_models, registry={"url": f"sqlite:///{tmp_path}/mlflow.db"})
    assert registry.connection(settings).verdict is Verdict.WARNING
    assert not (tmp_path / "mlflow.db").exists()
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    made = assembly.registry(settings)
    made.publish(make_bundle(tmp_path, "s1", **pair), None)
    made.promote(1)
    assert registry.connection(settings).told == "it answers and has 1 versions"
    assert registry.aliases(settings).told == "champion is 1"
    assert registry.files(settings).verdict is Verdict.OK
    (weights,) = (tmp_path / "artifacts").glob("**/serving/drafter.safetensors")
    weights.unlink()
    weights.write_bytes(b"cut")
    assert registry.files(settings).verdict is Verdict.PROBLEM
