"""The script that runs the commands of the docs leaves nothing behind when it is stopped."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.doc_blocks import ROOT

PROGRAM = """
import signal, sys
from pathlib import Path
from tests.run_docs import problem
signal.signal(signal.SIGTERM, signal.default_int_handler)
print(*problem("a page", ["bash", "-c", sys.argv[1]], Path(".")))
"""


def started(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def sleeping(process: subprocess.Popen[str]) -> list[psutil.Process]:
    below = psutil.Process(process.pid).children(recursive=True)
    return [each for each in below if each.name() == "sleep"]


def test_what_a_block_started_ends_with_the_script() -> None:
    with started("sleep 300; true") as process:
        deadline = time.monotonic() + 60
        while not (left := sleeping(process)) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert left
    assert not psutil.wait_procs(left, timeout=10)[1]


@pytest.mark.parametrize(("command", "told"), [("true", ""), ("echo out; exit 3", "a page: exit code 3\nout")])
def test_a_block_that_fails_is_told_with_its_output(command: str, told: str) -> None:
    with started(command) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert told in output
    assert ("exit code 3\nout" in output) == bool(told)
