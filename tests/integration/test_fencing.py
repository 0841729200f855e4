"""Two learners of one pair as real processes: one that slept while the other took over publishes nothing."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from omnidraft import config
from omnidraft.assembly.fleet import audit
from tests.integration.distiller_process import ROOT, Fleet, run_learner

NEVER = 1_000_000


def fall_asleep(process: "subprocess.Popen[bytes]", registry: Path) -> None:
    """Stop the process where it does not hold the registry's lock, which others would wait for."""
    (lock,) = registry.glob("*/.lock")
    while True:
        process.send_signal(signal.SIGSTOP)
        with suppress(Timeout), FileLock(lock, timeout=0.2):
            return
        process.send_signal(signal.SIGCONT)


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
        fall_asleep(fleet.process, tmp_path / "registry")
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
