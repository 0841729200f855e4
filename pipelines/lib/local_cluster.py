"""The services and what they lean on as real processes of this machine, for demo, soak and end-to-end tests."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from omnidraft.errors import OmnidraftError
from omnidraft.exit_status import describe_exit

STOP_TIMEOUT_S = 60.0
IDLE_SHARE = 0.2
"""Of one core: a process tree below this for a second does no work."""


class ServiceFailed(OmnidraftError):
    """A service ended or did not become ready; its log says why."""


class LocalCluster(AbstractContextManager["LocalCluster"]):
    """Starts `python -m services.NAME --config FILE`, each with its own log file, and stops them all at the end.

    Args:
        environ: what all of them see beside this process's environment.
    """

    def __init__(self, config_path: Path, logs: Path, environ: Mapping[str, str] | None = None) -> None:
        self._config_path = config_path
        self._logs = logs
        self._environ = {**os.environ, **(environ or {})}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str] | None = None) -> int:
        """The process id. Another command than the service of this name may be given."""
        self._logs.mkdir(parents=True, exist_ok=True)
        command = command or [sys.executable, "-m", f"services.{name}", "--config", str(self._config_path)]
        with (self._logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ, start_new_session=True)
        self._processes[name] = process
        return process.pid

    def adopt(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """From now on it is one of the fleet."""
        self._processes[name] = process

    def pid(self, name: str) -> int:
        """The process id."""
        return self._processes[name].pid

    def is_running(self, name: str) -> bool:
        """Whether it was started and has not ended."""
        return name in self._processes and self._processes[name].poll() is None

    def ended(self) -> list[str]:
        """Those that ended without being told to."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def wait_for(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Raises ServiceFailed when a service ends before, or the time passes."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    how = describe_exit(process.returncode)
                    raise ServiceFailed(
                        f"{name} ended before {what} by {how}. Its last words: {self._last_log_lines(name)}"
                    )
            if time.monotonic() > deadline:
                raise ServiceFailed(f"no {what} within {timeout_s:.0f} s; see the logs in {self._logs}")
            time.sleep(0.3)

    def wait_until_idle(self, name: str, timeout_s: float) -> None:
        """Until the service and its children use no processor time: a paused learner has finished its step."""
        self.wait_for(lambda: _share_used(self._processes[name].pid) < IDLE_SHARE, f"idle {name}", timeout_s)

    def children(self, name: str) -> list[psutil.Process]:
        """The processes that a service started, and theirs."""
        return _tree(self._processes[name].pid)[1:]

    def kill(self, name: str) -> None:
        """SIGKILL the service alone; what it started has to end by itself."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def kill_session(self, name: str) -> None:
        """SIGKILL the service and what it started, at once."""
        process = self._processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def pause(self, name: str) -> None:
        """SIGSTOP: it answers nobody, and its connections stay open."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        self._processes[name].send_signal(signal.SIGCONT)

    def stop(self, name: str) -> int:
        """SIGTERM; the exit code."""
        process = self._processes.pop(name)
        process.terminate()
        return _wait(process)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            _wait(process)

    def _last_log_lines(self, name: str) -> str:
        return last_log_lines((self._logs / f"{name}.log").read_text(errors="replace").strip().splitlines())


def last_log_lines(log: Sequence[str]) -> str:
    """What a process was doing when it ended, by its log: the last line, and where a fatal signal struck."""
    fatal = next((at for at, line in enumerate(log) if line.startswith("Fatal Python error")), len(log))
    said = log[fatal - 1] if fatal else "it said nothing"
    where = next((line.strip() for line in log[fatal:] if line.startswith("  File ")), None)
    return f"{said}; it was at {where}" if where else said


def is_serving(url: str) -> bool:
    """Whether the worker answers."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def emptied(folder: Path) -> Path:
    """The same folder, without what an earlier run left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def free_port() -> int:
    """Of the loopback interface, free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes]) -> int:
    """For one that was told to end; the exit code."""
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _signal_tree(process.pid, signal.SIGKILL)
        return process.wait()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal_tree(pid: int, number: signal.Signals) -> None:
    for process in _tree(pid):
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _share_used(pid: int) -> float:
    """Of one core, over a second."""

    def used_s() -> float:
        total = 0.0
        for process in _tree(pid):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    before = used_s()
    time.sleep(1.0)
    return used_s() - before
