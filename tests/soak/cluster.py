"""A whole fleet on this machine: a Kafka broker, an MLflow server, and our services in front of tiny or real models."""

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from omnidraft import child, config
from omnidraft.demo.local_cluster import LocalCluster, free_port, is_serving
from omnidraft.testing.tiny_models import make_drafter, make_target
from pipelines.lib.bytecode import bytecode_environment
from tests.kafka_fixture import load_local_broker
from tests.soak.network import Network

ACTOR = "ray::Distill"
"""The name that Ray gives the process in which the distiller learns."""
BROKER, REGISTRY = "broker", "registry"
WORKERS = ("decode_worker", "decode_worker-2")
SERVICES = ("controller", "distiller", *WORKERS)
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
CLOCKS, ROOT = Path(__file__).parent / "clock", Path(__file__).parents[2]


class Cluster(LocalCluster):
    """Broker, registry and services, with all files below one folder; a cluster opened there again goes on with them.

    Args:
        toml: sections of the settings beside log and registry.
        has_networks: broker and registry are reached over `networks`, which can be cut.
    """

    def __init__(self, folder: Path, toml: str, *, has_networks: bool = False, **environ: str) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            self.folder / "logs", config.without_settings(os.environ) | ENVIRON | bytecode_environment() | environ
        )
        self.urls = {name: f"http://127.0.0.1:{free_port()}" for name in WORKERS}
        self._ports = {BROKER: free_port(), REGISTRY: free_port()}
        self.networks = {name: Network(port) for name, port in self._ports.items()} if has_networks else {}
        reached = self._ports | {name: network.port for name, network in self.networks.items()}
        self._listeners = f"advertised.listeners=PLAINTEXT://127.0.0.1:{reached[BROKER]}\n"
        self.url, self.registry_url = self.urls[WORKERS[0]], f"http://127.0.0.1:{self._ports[REGISTRY]}"
        self.config_path = self.folder / "settings.toml"
        self.config_path.write_text(
            f'{toml}\n[log]\nurl = "kafka://127.0.0.1:{reached[BROKER]}"\n'
            f'topic_prefix = "soak"\nrequest_timeout_s = 5\n'
            f'[registry]\nurl = "http://127.0.0.1:{reached[REGISTRY]}"\nkeep_serving = {KEEP_SERVING}\n'
            "[metrics]\ndistiller_port = 0\ncontroller_port = 0\n"
        )
        self.settings = config.load(self.config_path, {})
        self.on_end: Callable[[str, int, str], None] = lambda name, returncode, last: None
        """Called with a process that ended by itself and the last line of its log, before it is started again."""

    def __exit__(self, *error: Any) -> None:
        for name in (*ALL, "actor"):
            self.resume(name)
        super().__exit__(*error)
        for network in self.networks.values():
            network.close()

    def bring_up(self, *names: str) -> None:
        """Start processes; only the broker is waited for."""
        for name in names:
            match name:
                case "broker":
                    started = load_local_broker().start(
                        self._ports[BROKER], self.folder / "kafka", more=self._listeners
                    )
                    self._processes[BROKER] = started.process
                case "registry":
                    store = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
                    files = ["--artifacts-destination", str(self.folder / "artifacts"), "--workers", "1"]
                    address = ["--host", "127.0.0.1", "--port", str(self._ports[REGISTRY])]
                    self.start(REGISTRY, [sys.executable, "-m", "mlflow", "server", *store, *files, *address])
                case _:
                    own = {"SOAK_CLOCK": str(self._clock(name)), "PYTHONPATH": f"{CLOCKS}{os.pathsep}{ROOT}"}
                    if name in self.urls:
                        own["OMNIDRAFT_WORKER__PORT"] = self.urls[name].rpartition(":")[2]
                    if name == "distiller":  # as on a machine of its own, where nothing is decoded
                        own["OMNIDRAFT_HOME"] = str(self.folder / "home")
                    set_own = ["env", *(f"{variable}={value}" for variable, value in own.items())]
                    self.start(name, [*set_own, *service_command(name.partition("-")[0], self.config_path)])

    def start_all(self, names: Sequence[str] = ALL) -> None:
        """Start registry, broker and services, each when the one before is ready; return when all are."""
        for name in names:
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
            case _ if name in self.urls:
                return is_serving(self.urls[name])
            case "distiller" if self._environ["OMNIDRAFT_LEARNER__HOST"] == "ray":
                return self.actor() is not None
            case _:
                return True

    def actor(self) -> psutil.Process | None:
        """Return the process in which the distiller learns now."""
        for each in psutil.Process(self.pid("distiller")).children(recursive=True):
            try:
                if ACTOR in " ".join(each.cmdline()):
                    return each
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
        self._each(name, psutil.Process.suspend)

    def resume(self, name: str) -> None:
        """Send SIGCONT, if it is there."""
        self._each(name, psutil.Process.resume)

    def limit_files(self, name: str, most_bytes: int) -> None:
        """Let the process write no file beyond this size, its log included; with 0 it finds every disk full."""
        limit = partial(psutil.Process.rlimit, resource=resource.RLIMIT_FSIZE)
        self._each(name, lambda process: limit(process, limits=(most_bytes, limit(process)[1])))

    def set_clock(self, name: str, ahead_s: float) -> None:
        """Step the clock of a service, and of what it starts."""
        self._clock(name).write_text(str(ahead_s))

    def _clock(self, name: str) -> Path:
        return self.folder / f"clock-{name}"

    def _each(self, name: str, act: Callable[[psutil.Process], object]) -> None:
        """Act on the processes that are meant by the name, as far as they are there: MLflow's server has children."""
        with suppress(psutil.NoSuchProcess):
            if name == "actor":
                found = [self.actor()] if self.is_running("distiller") else []
            else:
                found = [psutil.Process(self.pid(name))] if self.is_running(name) else []
            if name == REGISTRY and found:
                found += found[0].children(recursive=True)
            for process in filter(None, found):
                act(process)

    def restart_ended(self) -> list[str]:
        """Start every process again that ended by itself, as a supervisor would; return their names."""
        ended = {name: process.poll() for name, process in self._processes.items()}
        ended = {name: returncode for name, returncode in ended.items() if returncode is not None}
        for name, returncode in ended.items():
            self.on_end(name, returncode, "" if name == BROKER else child.last_lines(self._logs / f"{name}.log"))
            self.bring_up(name)
        return list(ended)

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
