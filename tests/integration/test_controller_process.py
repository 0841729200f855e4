"""The controller as a process shows its metrics, and ends when it is told to."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def test_a_controller_answers_scrapes_until_it_is_stopped(tmp_path: Path) -> None:
    environ = {
        "OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db",
        "OMNIDRAFT_REGISTRY__URL": f"directory:///{tmp_path}/registry",
        "OMNIDRAFT_MODELS__TARGET": "big",
        "OMNIDRAFT_METRICS__CONTROLLER_PORT": "0",
    }
    log = tmp_path / "controller.log"
    with log.open("wb") as said:
        command = [sys.executable, "-m", "services.controller"]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environ, stdout=said, stderr=said)
    try:
        text = httpx.get(_address(log, process)).raise_for_status().text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert 'omnidraft_promotions_total{target="big"} 0.0' in text
    assert "omnidraft_target_passes" not in text


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (found := re.search(r"metrics at (\S+)", log.read_text())) is None:
        assert time.monotonic() < deadline, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    return found[1]
