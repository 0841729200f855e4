"""The shell around every service: what it refuses is one line and exit code 2; a signal stops it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
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
def test_a_signal_sets_the_stop_event(number):
    stop = process.stop_on_signals()
    assert not stop.is_set()
    os.kill(os.getpid(), number)
    assert stop.wait(timeout=5)


DRAINS = """
import time
from omnidraft.child import run_supervised
from omnidraft.hosts import process

def drain():
    stop = process.stop_on_signals()
    print("serves", flush=True)
    stop.wait()
    print("drains", flush=True)
    time.sleep(process.SAME_REQUEST_S / 2)
    print("drained", flush=True)
    time.sleep(60 * {is_slow})

run_supervised(drain)
"""


@contextmanager
def draining(*, is_slow: bool) -> Iterator[subprocess.Popen[str]]:
    """A supervised service in a process group of its own that drains when it is stopped; a slow one does not end."""
    command = [sys.executable, "-c", DRAINS.format(is_slow=is_slow)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "serves\n"
        yield service


def test_a_signal_to_the_whole_process_group_leaves_the_service_its_drain():
    """It reaches the service twice, the second time from its supervisor."""
    with draining(is_slow=False) as service:
        os.killpg(service.pid, signal.SIGTERM)
        assert service.stdout.read() == "drains\ndrained\n"
    assert service.returncode == 0


def test_a_later_signal_ends_the_service_at_once():
    with draining(is_slow=True) as service:
        service.terminate()
        assert service.stdout.readline() == "drains\n"
        time.sleep(process.SAME_REQUEST_S)
        service.terminate()
    assert service.returncode == -signal.SIGTERM


def run_service(name: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from services.{name}.main import main; main()"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | environ, timeout=60
    )


LIVES = """
import logging, signal, sys, os, warnings
from omnidraft.hosts import process

def live(settings):
    stop = process.stop_on_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    stop.wait(5)
    warnings.warn("careful")
    try:
        1 // 0
    except ZeroDivisionError:
        logging.getLogger("omnidraft.test").exception("two\\nlines %s", "and more")
    return 0

sys.exit(process.serve("worker", live, None))
"""


def live(**environ: str) -> subprocess.CompletedProcess[str]:
    """A service that starts, warns, fails at something and stops."""
    command = [sys.executable, "-c", LIVES]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | environ, timeout=60
    )


def test_as_json_every_line_of_a_service_is_one_object():
    done = live(OMNIDRAFT_LOG_FORMAT="json", MLFLOW_TRACKING_URI="http://me:hunter2@host:5000")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["INFO", "INFO", "WARNING", "ERROR"]
    assert all(list(line)[:4] == ["time", "level", "logger", "message"] for line in lines)
    assert {line["role"] for line in lines} == {"worker"}
    written = datetime.fromisoformat(lines[0]["time"])
    assert abs(datetime.now(UTC) - written) < timedelta(minutes=1)
    assert lines[0]["message"].startswith("worker starting: log ")
    assert lines[0]["message"].endswith("http://***@host:5000")
    assert "careful" in lines[2]["message"]
    assert lines[3]["message"] == "two\nlines and more"
    assert "ZeroDivisionError" in lines[3]["exc_info"]


def test_as_text_which_is_the_default_lines_are_for_people():
    lines = live().stderr.splitlines()
    assert " INFO omnidraft.hosts.process: worker starting: log sqlite" in lines[0]


@pytest.mark.parametrize("service", ["decode_worker", "distiller", "controller"])
def test_what_a_service_refuses_is_json_too_where_that_was_promised(service):
    done = run_service(service, OMNIDRAFT_LOG_FORMAT="json", OMNIDRAFT_LOG="nonsense")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "setting log.url: not a log" in json.loads(line)["message"]


def test_a_format_that_is_none_is_refused_by_name():
    done = run_service("controller", OMNIDRAFT_LOG_FORMAT="xml")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["omnidraft controller: OMNIDRAFT_LOG_FORMAT must be text or json, got 'xml'"]


def test_an_interrupt_while_something_loads_does_not_wait_for_its_threads() -> None:
    """Of a child, since it ends the process: the loader's thread would go on for a minute."""
    program = """
import signal, threading, time
from omnidraft.hosts.process import end_at_once_on_interrupt
end_at_once_on_interrupt("loading")
thread = threading.Thread(target=time.sleep, args=(60,))
thread.start()
print("ready", flush=True)
thread.join()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=20.0)
    assert (child.returncode, "interrupted while loading" in told) == (130, True)


LINGERS = """
import atexit, logging, os, threading, time
from omnidraft.hosts import process

class Lingering:
    def __del__(self):
        time.sleep(600)

lingering, process.EXIT_S = [], 1.0

def live(settings):
    atexit.register(print, "handled", flush=True)
    match os.environ["LINGERS"]:
        case "objects":
            threading.Thread(target=time.sleep, args=[600]).start()
            lingering.append(Lingering())
        case "handler":
            atexit.register(time.sleep, 600)
    logging.getLogger("service").info("stopped")
    print("written", end="")
    return 7

process.run("worker", live)
"""


@pytest.mark.parametrize("what", ["objects", "handler"])
def test_a_service_that_stopped_is_gone(what: str) -> None:
    """Whatever else still runs in it; what its exit handlers do is done, as far as they come to an end."""
    command, environ = [sys.executable, "-c", LINGERS], {**os.environ, "LINGERS": what}
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 7
    assert ran.stderr.endswith("stopped\n")
    assert what == "handler" or ran.stdout == "writtenhandled\n"
