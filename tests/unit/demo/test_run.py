"""A run of the demo has a log, a registry and a port of its own, whatever the user's environment names, and begins only
where its numbers can work."""

import sys
from pathlib import Path

import pytest

from omnidraft.demo.run import DemoPlan, run_demo
from omnidraft.demo.services import local_cluster
from omnidraft.errors import RequestError
from tests.cli_runs import run_cli

SERVICE = """
import os, signal
from omnidraft import config
print(config.load() == config.Settings(), os.environ["OMNIDRAFT_HOME"], flush=True)
signal.pause()
"""


def test_services_take_no_settings_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/in-use.db",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "OMNIDRAFT_WORKER__PORT": "8123",
        "OMNIDRAFT_HOME": "/models",
    }.items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "logs" / "service.log"
    with local_cluster(tmp_path) as cluster:
        cluster.start("service", [sys.executable, "-c", SERVICE])
        cluster.wait_for(lambda: bool(output.read_text()), "settings", 60.0)
    assert output.read_text() == "True /models\n"


@pytest.mark.parametrize(("num_recorded", "num_snapshots"), [(0, 1), (96, 40)])
def test_more_snapshots_than_the_answers_make_are_refused_before_anything_starts(
    num_recorded: int, num_snapshots: int, tmp_path: Path
) -> None:
    plan = DemoPlan(tmp_path / "run", 1, 8, num_recorded=num_recorded, num_live=3, num_snapshots=num_snapshots)
    with pytest.raises(RequestError, match="choose fewer --num-snapshots or more --num-recorded"):
        run_demo(plan, None)
    assert not plan.out.exists()


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "file"
    out.touch()
    done = run_cli(["demo", "--out", out], monkeypatch, capsys)
    assert done.returncode == 2
    assert done.stderr.startswith(f"omnidraft: cannot write {out}/")
    assert done.stderr.endswith(": Not a directory; name another --out, or make it writable\n")
    assert done.stderr.count("\n") == 1
