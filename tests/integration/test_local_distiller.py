"""By default one target's learner runs in the distiller's own process; what needs Ray says so."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from omnidraft import config
from omnidraft.errors import ConfigError, ExtraMissing
from omnidraft.hosts import distiller
from omnidraft.throttle import NICENESS
from tests.integration.distiller_process import Fleet

PATIENCE_S = 60.0


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.fixture
def fleet(tmp_path: Path, temporary: Path):
    fleet = Fleet(tmp_path)
    del fleet.environ["OMNIDRAFT_LEARNER__HOST"]
    fleet.environ["TMPDIR"] = str(temporary)
    yield fleet
    if fleet.process is not None:
        fleet.process.kill()
        fleet.process.wait()


@pytest.mark.timeout(300)
def test_it_learns_shows_its_metrics_leaves_others_the_processors_and_ends_when_it_is_stopped(fleet: Fleet) -> None:
    process: subprocess.Popen[bytes] = fleet.start("-m", "omnidraft.cli", "run", "distiller")
    fleet.emit(8)
    fleet.wait_for(lambda: fleet.has_learned(6))
    assert f'target="{fleet.settings.models.target}"' in fleet.scraped()
    (learning,) = psutil.Process(process.pid).children()
    share = Path(f"/proc/{learning.pid}/autogroup")
    assert not share.exists() or share.read_text().endswith(f"nice {NICENESS}\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.timeout(300)
def test_what_a_killed_process_had_staged_is_removed_by_the_next_and_what_that_stages_by_itself(
    fleet: Fleet, temporary: Path
) -> None:
    """Staged snapshots hold users' texts."""
    process = fleet.start()
    fleet.emit(8)
    fleet.wait_for(lambda: fleet.has_learned(6))
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    abandoned = set(temporary.glob("omnidraft-*/"))
    assert any(path.name == "staging" for folder in abandoned for path in folder.iterdir())
    process = fleet.start()
    fleet.emit(8, first=8)
    fleet.wait_for(lambda: fleet.has_learned(12))
    assert not [folder for folder in abandoned if folder.exists()]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert list(temporary.glob("omnidraft-*")) == []


@pytest.mark.parametrize("reason", ["targets", "cluster", "setting"])
def test_several_targets_and_a_cluster_need_ray(reason, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    if reason == "cluster":
        monkeypatch.setitem(os.environ, "RAY_ADDRESS", "10.0.0.1:6379")
    models = {"target": "a", "more_targets": ("b",) if reason == "targets" else ()}
    with pytest.raises(ExtraMissing, match=r"pip install 'omnidraft\[ray\]'"):
        distiller.main(config.load(None, {}, models=models, learner={"host": "ray"} if reason == "setting" else {}))


def test_the_process_alone_learns_for_no_two_targets():
    settings = config.load(None, {}, models={"target": "a", "more_targets": ("b",)}, learner={"host": "process"})
    with pytest.raises(ConfigError, match="learns for one target"):
        distiller.main(settings)
