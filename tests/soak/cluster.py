"""A whole fleet on this machine: a Kafka broker, an MLflow server, and our services in front of tiny or real models."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from omnidraft import config
from omnidraft.demo.local_cluster import LocalCluster, free_port, is_serving
from omnidraft.testing.tiny_models import make_drafter, make_target
from pipelines.lib.bytecode import bytecode_environment
from tests.kafka_fixture import load_local_broker

ACTOR = "ray::Distill"
"""The name that Ray gives the process in which the distiller learns."""
BROKER, REGISTRY = "broker", "registry"
SERVICES = ("controller", "distiller", "decode_worker")
ALL = (REGISTRY, BROKER, *SERVICES)
"""In the order in which they start."""
START_TIMEOUT_S = 240.0
STOPPED_S = 10.0
KEEP_SERVING = 1_000_000
"""All versions: the verdict looks at every snapshot that answered."""
ENVIRON = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # ten processes that do nothing here
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "OMNIDRAFT_LEARNER__HOST": "ray",
    "OMP_NUM_THREADS": "1",
}


class Cluster(LocalCluster):
    """Broker, registry and services, with all files below one folder; a cluster opened there again goes on with them.

    Args:
        toml: sections of the settings beside log, registry, and the worker's port.
    """

    def __init__(self, folder: Path, toml: str) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        environ = config.without_settings(os.environ) | ENVIRON | bytecode_environment()
        super().__init__(self.folder / "logs", environ)
        self._broker_port, self._registry_port, worker_port = free_port(), free_port(), free_port()
        self.url, self.registry_url = (f"http://127.0.0.1:{port}" for port in (worker_port, self._registry_port))
        self.config_path = self.folder / "settings.toml"
        self.config_path.write_text(
            f'{toml}\nport = {worker_port}\n[log]\nurl = "kafka://127.0.0.1:{self._broker_port}"\n'
            f'topic_prefix = "soak"\nrequest_timeout_s = 5\n[registry]\nurl = "{self.registry_url}"\n'
            f"keep_serving = {KEEP_SERVING}\n"
        )
        self.settings = config.load(self.config_path, {})
        self.on_end: Callable[[str], None] = lambda name: None
        """Called with the name of a process that ended by itself, before it is started again."""

    def bring_up(self, *names: str) -> None:
        """Start processes; only the broker is waited for."""
        for name in names:
            match name:
                case "broker":
                    self._processes[BROKER] = (
                        load_local_broker().start(self._broker_port, self.folder / "kafka").process
                    )
                case "registry":
                    store = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
                    files = ["--artifacts-destination", str(self.folder / "artifacts"), "--workers", "1"]
                    address = ["--host", "127.0.0.1", "--port", str(self._registry_port)]
                    self.start(REGISTRY, [sys.executable, "-m", "mlflow", "server", *store, *files, *address])
                case _:
                    self.start(name, service_command(name, self.config_path))

    def start_all(self) -> None:
        """Start registry, broker and services, each when the one before is ready; return when all are."""
        for name in ALL:
            self.bring_up(name)
            self.wait_until_ready(name)

    def wait_until_ready(self, *names: str) -> None:
        """Wait, and restart what ends meanwhile. Raises ServiceFailed when it takes too long."""
        for name in names:
            self.wait_for(lambda name=name: self.is_ready(name), f"ready {name}", START_TIMEOUT_S)

    def _on_ended(self, what: str) -> None:
        self.restart_ended()

    def is_ready(self, name: str) -> bool:
        """Return whether the process does its work; `actor` is ready when the distiller has one."""
        match name:
            case "actor":
                return self.is_ready("distiller")
            case _ if not self.is_running(name):
                return False
            case "registry":
                return is_serving(self.registry_url, "/health")
            case "decode_worker":
                return is_serving(self.url)
            case "distiller":
                return self.actor() is not None
            case _:
                return True

    def actor(self) -> psutil.Process | None:
        """Return the process in which the distiller learns now."""
        for child in psutil.Process(self.pid("distiller")).children(recursive=True):
            try:
                if ACTOR in " ".join(child.cmdline()):
                    return child
            except psutil.Error:
                continue
        return None

    def kill(self, name: str) -> None:
        """SIGKILL a process. `actor` is the one that learns, `distiller` the one that started it."""
        if name == "actor":
            if (actor := self.actor()) is not None:
                actor.kill()
                psutil.wait_procs([actor], timeout=STOPPED_S)
            return
        process = self._processes.pop(name)
        if name == REGISTRY:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.kill()
        process.wait()

    def pause(self, name: str) -> None:
        """Send SIGSTOP: the process does not answer, and its connections stay open."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Send SIGCONT."""
        self._processes[name].send_signal(signal.SIGCONT)

    def restart_ended(self) -> list[str]:
        """Start every process again that ended by itself, as a supervisor would; return their names."""
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        for name in ended:
            self.on_end(name)
            self.bring_up(name)
        return ended

    def supervise(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run `restart_ended`, and what is given, again and again for so long, once at least."""
        until = time.monotonic() + seconds
        while True:
            self.restart_ended()
            meanwhile()
            if (left_s := until - time.monotonic()) <= 0:
                return
            time.sleep(min(0.1, left_s))


def service_command(name: str, config_path: Path) -> list[str]:
    """Return the command of a service of the fleet with these settings."""
    return [sys.executable, "-m", f"services.{name}", "--config", str(config_path)]


def empty_folder(folder: Path) -> Path:
    """Remove everything in the folder and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def tiny_settings(folder: Path) -> str:
    """Return settings of a fleet around two tiny random models, quick enough to be killed a hundred times."""
    target, drafter = folder.absolute() / "target", folder.absolute() / "drafter"
    if not drafter.exists():
        make_target(target, spread=0.3)
        make_drafter(drafter)
    return f"""\
[models]
target = "{target}"
drafter = "{drafter}"
precision = "float32"
drafter_precision = "float32"
[decode]
threads = 1
mode = "reproducible"
[learner]
records_per_step = 4
steps_per_snapshot = 8
held_out_every = 8
learning_rate = 1e-3
threads = 1
[controller]
tolerance = 1.0
[worker]
poll_s = 0.5
"""
