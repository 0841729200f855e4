"""Two learners of one pair as real processes: one that slept while the other took over publishes nothing."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from omnidraft import config
from omnidraft.assembly.fleet import audit
from tests.integration.distiller_process import ROOT, Fleet, run_learner

NEVER = 1_000_000


@pytest.mark.timeout(600)
def test_a_learner_that_wakes_behind_its_successor_ends_and_has_published_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.emit(6)
    fleet.process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.lethal_learner", str(tmp_path / "zombie"), str(NEVER)],
        cwd=ROOT,
        env={**os.environ, **fleet.environ},
        stderr=(tmp_path / "distiller.log").open("wb"),
    )
    try:
        fleet.wait_for(lambda: fleet.has_learned(6))
        fleet.process.send_signal(signal.SIGSTOP)
        fleet.emit(6, first=6)
        assert run_learner(fleet, tmp_path / "successor", offset=12) == 0
        fleet.process.send_signal(signal.SIGCONT)
        assert fleet.process.wait(120) == 1
    finally:
        fleet.process.kill()
        fleet.process.wait()
    assert "another distiller learns for this pair, so this one ends" in (tmp_path / "distiller.log").read_text()
    versions = fleet.registry.versions()
    assert [each.version for each in versions] == [1, 2, 3]
    for parent, child in pairwise(versions):
        assert child.manifest.parent_id == parent.manifest.snapshot_id
    assert (versions[-1].manifest.num_records, versions[-1].manifest.offsets) == (12, {0: 12})
    assert audit(config.load(environ=fleet.environ)).faults == ()
