"""The whole circle in separate processes, over a real Kafka broker, with a distiller that is killed in the middle."""

import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

import httpx
import psutil
import pytest

from omnidraft import assembly, config
from omnidraft.demo.local_cluster import LocalCluster, free_port, is_serving
from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.ports import Message, Registry, SnapshotVersion
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from tests.cli_runs import run_cli
from tests.soak.cluster import service_command

MORE = count(1000)
"""Questions that nobody asked before: of one question all answers are held out, or none."""
NUM_FIRST, NUM_SECOND = 20, 20
"""Each leads to a snapshot: fewer than the four records of its steps are learnable among 20 once in 3e7 runs."""
TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def settings_path(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
    kafka_bootstrap: str,
) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("circle")
    path = root / "settings.toml"
    path.write_text(f"""
[models]
target = "{tiny_models[0]}"
drafter = "{tiny_models[1]}"
precision = "float32"
drafter_precision = "float32"
[decode]
threads = 1
mode = "reproducible"
[log]
url = "kafka://{kafka_bootstrap}"
topic_prefix = "circle-{uuid.uuid4().hex[:8]}"
partitions = 2
[registry]
url = "sqlite:///{root}/mlflow.db"
[learner]
host = "ray"
records_per_step = 2
steps_per_snapshot = 2
held_out_every = 4
learning_rate = 3e-3
[worker]
port = {free_port()}
poll_s = 0.5
[metrics]
distiller_port = 0
controller_port = 0
[controller]
tolerance = 1.0
speed_tolerance = 100.0
canary_share = 0.4
canary_requests = 2
""")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        yield path


@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_killed_distiller_learns_every_acknowledged_record_once_and_workers_take_the_champion_up(
    settings_path: Path,
) -> None:
    """Offsets of the final snapshot cover the whole topic, and every record before them was learned, held out or
    counted as skipped, once. Snapshots are tried out as canaries on the way, and no text changes."""
    settings = config.load(settings_path, {})
    url = f"http://127.0.0.1:{settings.worker.port}"
    with LocalCluster(settings_path.parent / "logs") as fleet:
        for name in ("controller", "distiller", "decode_worker"):
            fleet.start(name, service_command(name, settings_path))
        fleet.wait_for(lambda: is_serving(url), "serving worker", TIMEOUT_S)
        registry = assembly.registry(settings)
        before = [ask(url, number)["text"] for number in range(NUM_FIRST)]
        fleet.wait_for(lambda: len(registry.versions()) >= 2, "version 2", TIMEOUT_S)
        distiller = psutil.Process(fleet.pid("distiller"))
        actors = [child for child in distiller.children(recursive=True) if "ray::Distill" in " ".join(child.cmdline())]
        assert actors
        distiller.kill()
        fleet.stop("distiller")
        assert psutil.wait_procs(actors, timeout=30)[1] == [], "an actor must not outlive its driver"
        after_kill = newest(registry)
        for number in range(NUM_FIRST, NUM_FIRST + NUM_SECOND):
            ask(url, number)
        fleet.start("distiller", service_command("distiller", settings_path))
        fleet.wait_for(lambda: newest(registry).version > after_kill.version, "a version after the kill", TIMEOUT_S)
        fleet.wait_for(lambda: asks_until_read(url, registry, NUM_FIRST + NUM_SECOND), "records learned", TIMEOUT_S)
        wait_for_learned_champion(fleet, registry, url)
        assert [ask(url, number)["text"] for number in range(NUM_FIRST)] == before
        assert fleet.stop("decode_worker") == 0
        log = list(topic_scan.messages(assembly.log_reader(settings, settings.log.traces_topic)))
        num_between = settings.learner.records_per_step * settings.learner.steps_per_snapshot
        fleet.wait_for(lambda: num_unlearned(settings, registry, log) < num_between, "last snapshot", TIMEOUT_S)
        assert fleet.stop("distiller") == 0
        assert "omnidraft_promotions_total{" in httpx.get(metrics_url(settings_path)).text
        assert fleet.stop("controller") == 0
    assert "canary" in control_messages(settings)
    assert len(log) >= NUM_FIRST + NUM_SECOND
    assert num_unlearned(settings, registry, log) < num_between
    final = newest(registry).manifest
    num_apart = final.counts.get("held_out", 0) + final.counts.get("duplicate", 0)
    assert final.num_records + num_apart == sum(final.offsets.values()) <= len(log)


@pytest.mark.kafka
@pytest.mark.timeout(300)
def test_a_stopped_controller_leaves_a_registry_the_command_line_can_read_and_roll_back(
    settings_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`snapshots list`, `rollback` and `traces tail` work on what the circle left behind."""

    def run(*arguments: str, code: int = 0) -> str:
        done = run_cli([*arguments, "--config", settings_path], monkeypatch, capsys)
        assert done.returncode == code, done.stderr
        return done.stdout

    def order(*arguments: str) -> str:
        """It waits, until a controller runs."""
        said = run("snapshots", *arguments, code=1)
        assert "as soon as a controller runs" in said
        with closing(assembly.controller(config.load(settings_path), CountingMetrics())) as controller:
            controller.obey()
            controller.align()
        return said

    versions = json.loads(run("snapshots", "list", "--json"))
    champion = next(each["version"] for each in versions if "champion" in each["aliases"])
    previous = next(each["version"] for each in versions if "previous" in each["aliases"])
    assert f"version {previous}" in order("rollback")
    shown = json.loads(run("snapshots", "show", "champion"))
    assert (shown["version"], "previous" in shown["aliases"]) == (previous, False)
    order("promote", str(champion))
    records = run("traces", "tail", "-n", "3").splitlines()
    assert [bool(json.loads(line)["emitted_ids"]) for line in records] == [True] * 3


def ask(url: str, number: int) -> dict[str, object]:
    """One short answer, and what was said of it."""
    body = {"messages": [{"role": "user", "content": f"How many clips? {number}"}], "max_tokens": 24, "seed": number}
    body |= {"temperature": 0.7, "figures": True}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0)
    response.raise_for_status()
    content = response.json()
    return {"text": content["choices"][0]["message"]["content"]} | content["omnidraft"]


def metrics_url(settings_path: Path) -> str:
    """Where the controller says that it answers scrapes."""
    found = re.search(r"metrics at (\S+)", (settings_path.parent / "logs/controller.log").read_text())
    assert found is not None
    return found[1]


def control_messages(settings: config.Settings) -> set[str]:
    """The kinds of all that was put on the control log."""
    reader = assembly.log_reader(settings, settings.log.control_topic)
    return {message.key.decode().split("/")[0] for message in topic_scan.messages(reader)}


def num_unlearned(settings: config.Settings, registry: Registry, log: Sequence[Message]) -> int:
    """The records behind the newest snapshot's offsets that will be learned once a step is full."""
    offsets = newest(registry).manifest.offsets
    unread = [each for each in log if each.offset >= offsets.get(each.partition, 0)]
    records = [codec.decode(each.value, each.headers) for each in unread]
    return sum(not is_held_out(each, settings.learner.held_out_every) for each in records)


def newest(registry: Registry) -> SnapshotVersion:
    return registry.versions()[-1]


def asks_until_read(url: str, registry: Registry, num_records: int) -> bool:
    """Whether the newest snapshot covers so many; if not, one more question: the last records wait for company."""
    if sum(newest(registry).manifest.offsets.values()) >= num_records:
        return True
    time.sleep(1.0)
    ask(url, next(MORE))
    return False


def wait_for_learned_champion(fleet: LocalCluster, registry: Registry, url: str) -> None:
    """Wait until the worker serves a champion that was learned, not the first snapshot.

    Requests go on meanwhile: a canary may still be out, and its trial needs traffic.
    """

    def is_taken_up() -> bool:
        return ask(url, next(MORE))["snapshot_version"] == registry.resolve("champion").version >= 2

    fleet.wait_for(is_taken_up, "worker at a learned champion", TIMEOUT_S)
