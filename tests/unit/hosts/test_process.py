"""The shell around every service: what it refuses is one line and exit code 2; a signal stops it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnidraft.errors import BusError
from omnidraft.hosts import process

ROOT = Path(__file__).parents[3]


@pytest.fixture
def restored_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_exit_code_is_that_of_the_host():
    assert process.serve("worker", lambda settings: 7, None) == 7


def test_the_host_gets_the_settings_of_the_file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("[worker]\nport = 8123\n")
    assert process.serve("worker", lambda settings: settings.worker.port, path) == 8123


def test_what_a_host_refuses_is_one_line_and_exit_code_2(capsys):
    def refuse(settings):
        raise BusError("kafka://nowhere:1 cannot be reached; start it with `make kafka`")

    assert process.serve("worker", refuse, None) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "omnidraft worker: kafka://nowhere:1 cannot be reached; start it with `make kafka`"


def test_a_bug_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        process.serve("worker", lambda settings: 1 // 0, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.usefixtures("restored_signals")
def test_a_signal_sets_the_stop_event_and_the_next_one_ends_the_process(number):
    stop = process.stop_on_signals()
    assert not stop.is_set()
    os.kill(os.getpid(), number)
    assert stop.wait(timeout=5)
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("service", ["decode_worker", "distiller", "controller"])
def test_a_service_refuses_missing_settings_without_a_traceback(service):
    command = [sys.executable, "-m", f"services.{service}", "--config", "nowhere.toml"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1].endswith(": no settings file at nowhere.toml")
    assert "Traceback" not in ran.stderr
