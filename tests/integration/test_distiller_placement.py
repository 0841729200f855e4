"""Distillers on a Ray cluster of several nodes: each target's learner goes where its resources are, and of two for one
pair one ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from omnidraft.testing.tiny_models import make_drafter, make_target

ROOT = Path(__file__).parents[2]
ACTOR = "ray::Distill"
"""How Ray names the actor's process."""
TIMEOUT_S = 150.0
STOP_S = 30.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a cluster whose head takes no learner, and two nodes that take one each."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", os.urandom(16).hex())
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"distiller": 1})
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    """Three targets, one drafter."""
    make_drafter(tmp_path / "drafter")
    targets = [str(make_target(tmp_path / f"target-{number}", seed=number)) for number in range(3)]
    file = tmp_path / "settings.toml"
    file.write_text(
        f"""\
        [models]
        target = "{targets[0]}"
        more_targets = {targets[1:]}
        drafter = "{tmp_path}/drafter"
        [log]
        url = "sqlite:///{tmp_path}/log.db"
        [registry]
        url = "directory:///{tmp_path}/registry"
        [learner]
        ray_resources = {{distiller = 1}}
        """
    )
    return file


@pytest.fixture
def distiller(address: str, settings_file: Path, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """What it has said so far."""
    file = tmp_path / "distiller.log"
    command = [sys.executable, "-m", "services.distiller", "--config", settings_file]
    environ = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    with file.open("wb") as log:
        process = subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=log, stderr=log)
    yield file.read_text
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(STOP_S) == 0  # though one learner never had a place
    finally:
        process.kill()


def node_of(pid: int) -> psutil.Process:
    """The raylet that started this actor."""
    actor = psutil.Process(pid)
    assert ACTOR in " ".join(actor.cmdline())
    raylet = actor.parent()
    assert raylet is not None
    return raylet


def test_learners_have_a_node_each_and_one_without_a_place_is_told_of(
    distiller: Callable[[], str], settings_file: Path
) -> None:
    placed = re.compile(r"(\S+): learning in process (\d+)")
    deadline = time.monotonic() + TIMEOUT_S
    while len(placed.findall(distiller())) < 2 or "waits for a Ray node" not in distiller():
        assert time.monotonic() < deadline, distiller()
        time.sleep(0.5)
    told = dict(placed.findall(distiller()))
    raylets = [node_of(int(pid)) for pid in told.values()]
    assert len({raylet.pid for raylet in raylets}) == len(told) == 2
    assert all("distiller,1" in " ".join(raylet.cmdline()) for raylet in raylets)
    (waiting,) = re.findall(r"(\S+): waits for a Ray node that has (.+) free", distiller())
    assert waiting[0] not in told
    assert "{'distiller': 1.0}" in waiting[1]
