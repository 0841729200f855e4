"""The services and their dependencies as real processes on this machine, for the demo, benchmarks and tests."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import httpx

from omnidraft import child
from omnidraft.errors import OmnidraftError

STOP_TIMEOUT_S = 60.0


class ServiceFailed(OmnidraftError):
    """A service ended or did not become ready; its log says why."""


class LocalCluster(AbstractContextManager["LocalCluster"]):
    """Starts processes, each with its own log file, and stops them all at the end, or when this process is killed.

    Args:
        logs: the folder of the log files, made if it is missing.
        environ: the environment of all processes; without it this one's.
    """

    def __init__(self, logs: Path, environ: Mapping[str, str] | None = None) -> None:
        self._logs = logs
        self._environ = dict(os.environ if environ is None else environ)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str]) -> int:
        """Start `command` under this name and return the process id."""
        self._logs.mkdir(parents=True, exist_ok=True)
        process = child.start(command, self._logs / f"{name}.log", self._environ)
        self._processes[name] = process
        return process.pid

    def pid(self, name: str) -> int:
        """Return the process id."""
        return self._processes[name].pid

    def is_running(self, name: str) -> bool:
        """Return whether it was started and has not ended."""
        return name in self._processes and self._processes[name].poll() is None

    def wait_for(self, ready: Callable[[], bool], what: str, timeout_s: float, *, poll_s: float = 0.3) -> None:
        """Wait until `ready()`. Raises ServiceFailed when a service ends before, or the time passes."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self._on_ended(what)
            if time.monotonic() > deadline:
                raise ServiceFailed(f"no {what} within {timeout_s:.0f} s; see the logs in {self._logs}")
            time.sleep(poll_s)

    def _on_ended(self, what: str) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                how, last = child.describe_exit(process.returncode), child.last_lines(self._logs / f"{name}.log")
                raise ServiceFailed(f"{name} ended before {what} by {how}. Its last log lines: {last}")

    def stop(self, name: str) -> int:
        """Send SIGTERM and return the exit code."""
        process = self._processes.pop(name)
        child.stop(process, grace_s=STOP_TIMEOUT_S)
        return process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        child.stop(*self._processes.values(), grace_s=STOP_TIMEOUT_S)


def is_serving(url: str, path: str = "/readyz") -> bool:
    """Return whether the server is ready, a worker or another with a probe at `path`, over plain HTTP."""
    try:
        # loading the authorities that `verify` asks takes a processor for 25 ms, from the worker that measures itself
        return httpx.get(f"{url}{path}", timeout=2.0, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
