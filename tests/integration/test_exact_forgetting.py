"""`omnidraft tenants forget --exact` on a fleet that runs: a drafter that never saw the tenant serves in the end, its
files bit for bit those of a fleet which never had the tenant; on SQLite, on a real broker, and there with MLflow."""

import base64
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from omnidraft import assembly, config
from omnidraft.assembly.fleet import audit
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.snapshots.manifest import Manifest, digest
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.tiny_models import TEXT
from omnidraft.traces.record import TraceRecord
from tests.cli_runs import run_cli
from tests.distiller_runs import until_idle
from tests.integration.distiller_process import Fleet
from tests.integration.settings_runs import emit, environ
from tests.tiny_fleet import LEARNER, fleet_settings, running_fleet
from tests.tiny_pair import Pair

LEAVER, STAYER = "team-leaver", "team-stayer"
NUM = 60
"""Records of each."""
NOW_MS = time.time_ns() // 1_000_000
PATIENCE_S = 120.0

Run = Callable[..., Any]


@pytest.fixture(params=["full", "lora"])
def train(request: pytest.FixtureRequest) -> str:
    return request.param


ON_KAFKA = pytest.param("kafka", marks=pytest.mark.kafka)


@pytest.fixture(params=["sqlite", ON_KAFKA, pytest.param("mlflow", marks=[pytest.mark.kafka, pytest.mark.long])])
def make_settings(
    request: pytest.FixtureRequest,
    tiny_models: tuple[Path, Path],
    tmp_path: Path,
    omnidraft_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., config.Settings]:
    """Settings of a fleet with a log and a registry of its own, by name."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    models = tiny_models[0], unrounded(tiny_models[1], tmp_path / "drafter")
    prefix = uuid.uuid4().hex[:8]

    def make(name: str, **learner: object) -> config.Settings:
        folder = tmp_path / name
        folder.mkdir()
        places: dict[str, dict[str, object]] = {}
        if request.param != "sqlite":
            servers = request.getfixturevalue("kafka_bootstrap")
            places["log"] = {"url": f"kafka://{servers}", "topic_prefix": f"exact-{prefix}-{name}"}
        url = f"sqlite:///{folder}/mlflow.db" if request.param == "mlflow" else f"directory:///{folder}/registry"
        places["registry"] = {"url": url, "keep_resume": 1000}
        section = LEARNER | {"replay_records": 1, "held_out_every": 4} | learner
        return fleet_settings(models, folder, learner=section, **places)

    return make


def unrounded(drafter: Path, copy: Path) -> Path:
    """Return a drafter whose weights are no numbers of bfloat16: a learner that starts anew has to have all bits."""
    shutil.copytree(drafter, copy)
    tensors = load_file(copy / "model.safetensors")
    save_file(
        {name: each.float() * 1.001 for name, each in tensors.items()}, copy / "model.safetensors", {"format": "pt"}
    )
    return copy


def records(settings: config.Settings, num: int = NUM, first: int = 0) -> Iterator[TraceRecord]:
    """Of both tenants in turn."""
    tokenizers, models = assembly.vocabularies(settings), settings.models
    pair = Pair(tokenizers.drafter_folder, tokenizers.drafter, tokenizers.target, tokenizers.alignment)
    facts = {"time_ms": NOW_MS, "target": models.target, "drafter": models.drafter}
    for number in range(first, first + num):
        for tenant in (STAYER, LEAVER):
            text = TEXT[number % len(TEXT)]
            yield pair.record(f"{tenant}-{number}", text, seed=number, tenant=tenant, **facts)


def learned(settings: config.Settings, folder: Path) -> dict[int, Manifest]:
    """Number of steps -> the snapshot, once a distiller has learned what the log holds."""
    distiller = assembly.distillation(settings, CountingMetrics(), folder=folder / "distiller-alone")
    distiller.run(until_idle(6)(distiller))
    return {each.manifest.num_steps: each.manifest for each in assembly.registry(settings).versions()}


def newest(registry: Registry) -> SnapshotVersion:
    return registry.resolve("latest")


def wait_until(is_done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def working_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        yield


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    def run(settings: config.Settings, *options: str) -> Any:
        models = settings.models
        pair = {"OMNIDRAFT_MODELS__TARGET": models.target, "OMNIDRAFT_MODELS__DRAFTER": models.drafter}
        with working_in(tmp_path, monkeypatch):
            command = ("tenants", "forget", LEAVER, "--exact", "--yes", "--accept-retention", *options)
            return run_cli(command, monkeypatch, capsys, environ(settings) | pair)

    return run


def certificate(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("forgotten-*.json")
    return json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))


@pytest.mark.timeout(300)
def test_the_drafter_that_serves_in_the_end_is_that_of_a_fleet_without_the_tenant(
    make_settings: Callable[..., config.Settings], train: str, forget: Run, tmp_path: Path
) -> None:
    settings = make_settings("both", train=train)
    emit(settings, *records(settings))
    with running_fleet(settings, tmp_path) as fleet:
        wait_until(lambda: fleet.registry.versions(), "it never published")
        wait_until(lambda: sum(newest(fleet.registry).manifest.offsets.values()) > 1.8 * NUM, "it never learned all")
        wait_until(lambda: fleet.registry.resolve("champion").manifest.num_records, "none was promoted")
        before = fleet.registry.resolve("champion")
        done = forget(settings, "--wait", str(PATIENCE_S))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "learning goes back to snapshot 1 and reads" in done.stdout
        assert "the newest weights never saw team-leaver" in done.stdout
        wait_until(lambda: fleet.worker.served[0].engine.slot.current.manifest.forgets, "it was never taken up")
        wait_until(lambda: fleet.registry.resolve("champion").manifest.forgets, "its alias was never moved")
        assert not fleet.registry.resolve("champion").manifest.catching_up_to
        versions = fleet.registry.versions()
    written = certificate(tmp_path)
    (result,) = (each for each in versions if each.version == written["result"]["version"])
    without = make_settings("alone", train=train)
    emit(without, *(each for each in records(settings) if each.tenant == STAYER))
    alone = learned(without, tmp_path)[result.manifest.num_steps]
    assert alone.num_records >= NUM // 2
    assert result.manifest.sha256 == written["result"]["sha256"] == alone.sha256
    assert len(alone.sha256) >= 5
    assert written["result"]["digest"] == digest(result.manifest)
    assert written["start"]["version"] == 1
    assert written["num_records"] == alone.num_records
    again = [each for each in versions if each.manifest.catching_up_to]
    assert again
    assert all(each.judgement is None and each.version > before.version for each in again)
    assert audit(settings).faults == ()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("make_settings", [ON_KAFKA], indirect=True)
@pytest.mark.parametrize("are_all_left", [True, False])
def test_a_brokers_retention_may_have_taken_what_was_learned_before_the_tenant_and_no_more(
    make_settings: Callable[..., config.Settings], are_all_left: bool, forget: Run, tmp_path: Path
) -> None:
    settings, num_before = make_settings("both"), NUM // 4
    emit(settings, *(each for each in records(settings, num_before) if each.tenant == STAYER))
    learned(settings, tmp_path / "both")
    before = newest(assembly.registry(settings)).manifest
    emit(settings, *records(settings, NUM // 2, first=num_before))
    learned(settings, tmp_path / "both")
    delete(settings, before.offsets[0] if are_all_left else num_before + NUM - 1)
    asked = forget(settings, "--wait", "0")
    if not are_all_left:
        assert asked.returncode == 2, asked.stdout + asked.stderr
        assert f"no snapshot from before {LEAVER} is left after which the log has every message" in asked.stderr
        assert "without --exact it is forgotten but for the weights" in asked.stderr
        assert not newest(assembly.registry(settings)).manifest.forgets
        return
    assert asked.returncode == 1, asked.stdout + asked.stderr
    learned(settings, tmp_path / "both")
    done = forget(settings, "--wait", str(PATIENCE_S))
    assert done.returncode == 0, done.stdout + done.stderr
    without = make_settings("alone")
    emit(without, *(each for each in records(settings, num_before + NUM // 2) if each.tenant == STAYER))
    written, alone = certificate(tmp_path), learned(without, tmp_path / "alone")
    result = assembly.registry(settings).resolve(str(written["result"]["version"])).manifest
    assert result.num_records > before.num_records > 0
    assert result.sha256 == written["result"]["sha256"] == alone[result.num_steps].sha256


def delete(settings: config.Settings, before: int) -> None:
    """As the broker does once its retention is over."""
    from kafka import KafkaAdminClient, TopicPartition

    with closing(KafkaAdminClient(bootstrap_servers=settings.log.url.removeprefix("kafka://"))) as admin:
        admin.delete_records({TopicPartition(settings.log.traces_topic, 0): before})


@pytest.mark.timeout(300)
def test_a_distiller_that_is_killed_meanwhile_goes_on_to_the_same_files(tmp_path: Path, forget: Run) -> None:
    both, alone = Fleet(tmp_path), Fleet(tmp_path)
    both.environ["OMNIDRAFT_LEARNER__HOST"] = "process"
    apart = {
        "OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/alone.db",
        "OMNIDRAFT_REGISTRY__URL": f"directory:///{tmp_path}/own",
    }
    alone.settings = config.load(environ=alone.environ | apart)
    for number in range(30):
        for fleet in (both, alone):
            fleet.emit(1, first=number, tenant=STAYER, time_ms=NOW_MS)
        both.emit(1, first=1000 + number, tenant=LEAVER, time_ms=NOW_MS)
    process = both.start()
    both.wait_for(lambda: both.has_learned(54))
    asked = forget(both.settings, "--wait", "0")
    assert (asked.returncode, "not done yet" in asked.stdout) == (1, True), asked.stdout + asked.stderr
    wait_until(lambda: both.newest().catching_up_to, "it never began")
    process.kill()
    process.wait()
    assert both.newest().catching_up_to
    process = both.start()
    done = forget(both.settings, "--wait", str(PATIENCE_S))
    assert done.returncode == 0, done.stdout + done.stderr
    process.terminate()
    process.wait()
    result = certificate(tmp_path)["result"]
    forgotten = both.registry.resolve(str(result["version"])).manifest
    assert forgotten.num_records > 20
    assert result["sha256"] == forgotten.sha256 == learned(alone.settings, tmp_path)[forgotten.num_steps].sha256
