"""A test run that is killed leaves no process behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import subprocess, sys, time
from tests.orphans import name_run
name_run(object())
started = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(started.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.long
def test_what_a_killed_run_had_started_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        left = psutil.Process(int(run.stdout.readline()))
        assert psutil.wait_procs([left], timeout=3)[1]
        run.kill()
    assert not psutil.wait_procs([left], timeout=30)[1]
