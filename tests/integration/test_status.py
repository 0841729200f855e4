"""What `omnidraft status` tells of a fleet, with a real log, real registries and a real worker, up or down."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from omnidraft import assembly, config
from omnidraft.config import WorkerSettings
from omnidraft.doctor import machine
from omnidraft.doctor.finding import Verdict
from omnidraft.ports import Outgoing, Pause
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics, PrometheusMetrics
from tests.cli_runs import run_cli
from tests.http_server import served
from tests.snapshot_folders import make_bundle, manifest
from tests.tiny_engine import PATIENCE_S, tiny_settings

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9"

Status = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def settings(tmp_path: Path, tiny_models: tuple[Path, Path]) -> config.Settings:
    log, registry = (
        {"url": f"sqlite:///{tmp_path}/log.db", "partitions": 2},
        {"url": f"directory:///{tmp_path}/registry"},
    )
    return tiny_settings(tiny_models, log=log, registry=registry, worker={"poll_s": 0.01, "port": 9})


@pytest.fixture
def status(
    settings: config.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Status:
    """Run the command with these settings."""
    path = settings_file(settings, tmp_path)
    monkeypatch.setenv("COLUMNS", "250")

    def run(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        return run_cli(("status", "--config", path, *arguments), monkeypatch, capsys, environ)

    return run


def settings_file(settings: config.Settings, folder: Path) -> Path:
    path = folder / "settings.toml"
    lines = []
    for section in ("models", "log", "registry", "worker"):
        lines.append(f"[{section}]")
        fields = getattr(settings, section).model_dump(exclude_unset=True)
        lines += [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    path.write_text("\n".join(lines))
    return path


def fill_log(settings: config.Settings) -> None:
    """Seven trace messages in two partitions, three dead letters for two reasons, learning paused."""
    traces = assembly.log_writer(settings, settings.log.traces_topic)
    traces.append([Outgoing(str(number).encode(), b"record") for number in range(7)])
    letters = assembly.log_writer(settings, settings.log.dead_letters_topic)
    reasons = (b"unreadable", b"unreadable", b"other_alignment")
    letters.append([Outgoing(b"k", b"bytes", {"reason": reason}) for reason in reasons])
    assembly.control_log(settings, CountingMetrics()).put(("pause",), Pause())


def publish_two(settings: config.Settings, tmp_path: Path) -> None:
    """Version 1 is champion and knows nothing of the log; version 2 is challenger and has learned four records."""
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    registry = assembly.registry(settings)
    registry.publish(make_bundle(tmp_path, "s1", **pair), None)
    registry.promote(1)
    told = {"offsets": {0: 1, 1: 1}, "agreement_before": 0.5, "agreement_after": 0.625, "num_records": 1234}
    registry.publish(make_bundle(tmp_path, "s2", parent_id="s1", **pair, **told), 1)


def test_status_tells_versions_lag_dead_letters_and_the_pause(
    settings: config.Settings, status: Status, tmp_path: Path
) -> None:
    fill_log(settings)
    publish_two(settings, tmp_path)
    told = json.loads(status("--json").stdout)
    (target,) = told["targets"]
    names = [(each["name"], each["version"]) for each in target["standings"]]
    assert names == [("champion", 1), ("challenger", 2), ("latest", 2)]
    newest = target["standings"][-1]
    assert (newest["agreement_before"], newest["agreement_after"], newest["num_records"]) == (0.5, 0.625, 1234)
    ends = assembly.log_reader(settings, settings.log.traces_topic).end_offsets()
    assert told["trace_ends"] == {str(partition): end for partition, end in ends.items()}
    assert target["lag"] == {str(partition): end - 1 for partition, end in ends.items()}
    assert target["total_lag"] == 5
    assert target["is_learning_paused"] is True
    assert told["dead_letters"] == {"number": 3, "by_reason": {"unreadable": 2, "other_alignment": 1}}
    shown = status().stdout
    for words in ("champion", "challenger", "1,234", "0.625", "paused", "unreadable: 2", "dead letters: 3"):
        assert words in shown


@pytest.fixture
def worker_url(settings: config.Settings, omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A worker that serves version 1 of its pair and has answered once."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    metrics = PrometheusMetrics()
    worker = assembly.worker(settings, metrics)
    publish_base(worker, settings)
    refresher = worker.served[0].updater
    assert refresher is not None
    refresher.step(threading.Event())
    requests = RequestQueue(metrics, max_waiting=2)
    models = [ServedModel(each.engine, each.target.fingerprint) for each in worker.served]
    with served(application(requests, models, settings.worker, metrics.render)) as url:
        asked = {"prompt": "How many clips", "max_tokens": 12, "seed": 3}
        httpx.post(f"{url}/v1/completions", json=asked).raise_for_status()
        yield url
        requests.close(PATIENCE_S)
    assert worker.producer is not None
    worker.producer.close(PATIENCE_S)


def publish_base(worker: assembly.Worker, settings: config.Settings) -> None:
    """The base drafter as version 1, champion."""
    pair = worker.engine.pair
    told = manifest("base-1", target=pair.target, drafter=pair.drafter, alignment=pair.alignment)
    folder = Path(settings.registry.url.split(":///", 1)[1]).parent / "base-1"
    bundle.write(folder, told, {})
    registry = assembly.registry(settings)
    registry.publish(folder, None)
    registry.promote(1)


def test_a_worker_tells_what_it_serves_and_how_well(status: Status, settings: config.Settings, worker_url: str) -> None:
    done = status("--json", "--worker", f"{worker_url}/")
    told = json.loads(done.stdout)
    assert (done.returncode, told["problems"]) == (0, [])
    (worker,) = told["workers"]
    assert (worker["url"], worker["is_alive"], worker["is_ready"]) == (worker_url, True, True)
    (figures,) = worker["served"]
    assert (figures["target"], figures["version"]) == (settings.models.target, 1)
    assert (figures["num_requests"], figures["num_failed"]) == (1, 0)
    assert 1 <= figures["tokens_per_pass"] <= 6
    assert 0 <= figures["agreement"] <= 1
    assert worker_url in status("--worker", worker_url).stdout


def test_a_worker_whose_decoding_thread_ended_is_named(
    status: Status, settings: config.Settings, tiny_models: tuple[Path, Path], omnidraft_home: Path
) -> None:
    fill_log(settings)
    metrics = PrometheusMetrics()
    requests = RequestQueue(metrics, max_waiting=1)
    requests.close(PATIENCE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        made = assembly.engine(tiny_settings(tiny_models), metrics)
    models = [ServedModel(made.engine, made.target.fingerprint)]
    with served(application(requests, models, settings.worker, metrics.render)) as url:
        done = status("--json", "--worker", url)
    (worker,) = json.loads(done.stdout)["workers"]
    assert (done.returncode, worker["is_alive"], worker["is_ready"]) == (1, False, False)
    assert "the decoding thread ended" in worker["problem"]


@pytest.mark.parametrize("metrics_key", [None, "a-key-of-prometheus"])
def test_a_worker_that_asks_for_a_key_is_looked_at_without_one_but_for_that_of_its_metrics(
    status: Status,
    settings: config.Settings,
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
    metrics_key: str | None,
) -> None:
    fill_log(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        keys = {"api_keys": [{"key": "a-key-of-sixteen-letters"}], "metrics_key": metrics_key}
        pair = tiny_settings(tiny_models, worker=keys)
        metrics = PrometheusMetrics(targets=pair.models.targets)
        made = assembly.engine(pair, metrics)
    requests = RequestQueue(metrics, max_waiting=1)
    models = [ServedModel(made.engine, made.target.fingerprint)]
    with served(application(requests, models, pair.worker, metrics.render)) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        if metrics_key is not None:
            without = json.loads(status("--json", "--worker", url).stdout)["workers"][0]
            assert "shows its metrics to holders of their key only" in without["problem"]
        environ = {} if metrics_key is None else {"OMNIDRAFT_WORKER__METRICS_KEY": metrics_key}
        done = status("--json", "--worker", url, **environ)
        section = WorkerSettings(port=int(url.rsplit(":", 1)[1]), metrics_key=metrics_key)
        found = machine.port(pair.model_copy(update={"worker": section}))
    requests.close(PATIENCE_S)
    (worker,) = json.loads(done.stdout)["workers"]
    assert (worker["problem"], worker["is_ready"]) == (None, True)
    assert [each["target"] for each in worker["served"]] == [pair.models.target]
    assert found.verdict is Verdict.OK
    assert pair.models.target in found.told


def test_servers_that_are_no_workers_and_one_that_is_not_there_are_rows(status: Status) -> None:
    stranger, locked = FastAPI(), FastAPI()
    locked.get("/v1/models")(_nobody)
    with served(stranger) as url, served(locked) as other:
        told = json.loads(status("--json", "--worker", url, "--worker", other, "--worker", NOBODY).stdout)
    problems = [worker["problem"] for worker in told["workers"]]
    assert "is no omnidraft worker: /v1/models gave 404" in problems[0]
    assert "is no omnidraft worker: /v1/models gave 401" in problems[1]
    assert "does not answer" in problems[2]


def _nobody() -> None:
    raise HTTPException(401)


@pytest.mark.parametrize(
    ("environ", "missing", "problem"),
    [
        ({"OMNIDRAFT_LOG": "kafka://127.0.0.1:9", "OMNIDRAFT_LOG__REQUEST_TIMEOUT_S": "1"}, "log", "127.0.0.1:9"),
        ({"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}, "registry", "127.0.0.1:9"),
    ],
    ids=["broker", "registry"],
)
def test_what_cannot_be_reached_is_a_line_and_the_rest_is_told(
    status: Status, settings: config.Settings, tmp_path: Path, environ: dict[str, str], missing: str, problem: str
) -> None:
    fill_log(settings)
    publish_two(settings, tmp_path)
    done = status("--json", **environ)
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert any(line.startswith(missing) and problem in line for line in told["problems"])
    (target,) = told["targets"]
    assert (target["standings"] is None) == (missing == "registry")
    assert (told["trace_ends"] is None) == (told["dead_letters"] is None) == (missing == "log")
    assert target["is_learning_paused"] is (None if missing == "log" else True)
    shown = status(**environ).stdout
    assert f"problem: {missing}" in shown
    assert "?" in shown


def test_where_workers_elsewhere_write_records_one_that_nobody_named_is_no_alarm(
    status: Status, settings: config.Settings, tmp_path: Path
) -> None:
    fill_log(settings)
    publish_two(settings, tmp_path)
    done = status("--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["problems"]) == (0, [])
    (note,) = told["notes"]
    assert note.startswith(f"worker {NOBODY}: does not answer")
    assert "a worker wrote a trace record 0 s ago: name it with --worker" in note
    assert "name it with --worker" in status().stdout
    assert status("--json", "--worker", NOBODY).returncode == 1
    with closing(sqlite3.connect(tmp_path / "log.db")) as log, log:
        log.execute("UPDATE messages SET timestamp_ms = timestamp_ms - 601000")
    old = json.loads(status("--json").stdout)
    assert ([line.split(":")[0] for line in old["problems"]], old["notes"]) == (["worker http"], [])


def test_asking_makes_no_log_and_no_registry(status: Status, tmp_path: Path) -> None:
    done = status("--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert [line.split(":")[0].split(" ")[0] for line in told["problems"]] == ["log", "registry", "worker"]
    assert [path.name for path in tmp_path.iterdir()] == ["settings.toml"]


def test_watching_tells_it_again_until_it_is_interrupted(settings: config.Settings, tmp_path: Path) -> None:
    fill_log(settings)
    command = [sys.executable, "-m", "omnidraft.cli", "status", "--watch", "--json"]
    with subprocess.Popen(
        [*command, "--config", settings_file(settings, tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        taken = [json.loads(watching.stdout.readline())["taken_ms"] for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=PATIENCE_S)
    assert taken[1] - taken[0] >= 2000
    assert watching.returncode == 0
