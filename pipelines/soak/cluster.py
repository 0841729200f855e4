"""A whole fleet on this machine: a Kafka broker, an MLflow server, and our services in front of tiny or real models."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import ModuleType, TracebackType

import psutil

from omnidraft import config
from omnidraft.demo.local_cluster import (
    LocalCluster,
    ServiceFailed,
    free_port,
    is_serving,
    service_command,
    tiny_models,
)
from pipelines.lib.bytecode import bytecode_environment

LOCAL_BROKER = Path(__file__).parents[2] / "deploy" / "kafka" / "local_broker.py"
ACTOR = "ray::Distill"
"""The name that Ray gives the process in which the distiller learns."""
BROKER, REGISTRY = "broker", "registry"
SERVICES = ("controller", "distiller", "decode_worker")
START_TIMEOUT_S = 240.0
STOPPED_S = 10.0
KEEP_SERVING = 1_000_000
"""All versions: the verdict looks at every snapshot that answered."""
ENVIRON = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # ten processes that do nothing here
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "OMP_NUM_THREADS": "1",
}


class Cluster(AbstractContextManager["Cluster"]):
    """Broker, registry and services, with all files below one folder; a cluster opened there again goes on with them.

    Args:
        toml: sections of the settings beside log, registry, and the worker's port.
    """

    def __init__(self, folder: Path, toml: str) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._broker_port, self._registry_port, worker_port = free_port(), free_port(), free_port()
        self.config_path = self.folder / "settings.toml"
        self.config_path.write_text(
            f'{toml}\nport = {worker_port}\n[log]\nurl = "kafka://127.0.0.1:{self._broker_port}"\n'
            f'topic_prefix = "soak"\nrequest_timeout_s = 5\n[registry]\nurl = "{self.registry_url}"\n'
            f"keep_serving = {KEEP_SERVING}\n"
        )
        self.settings = config.load(self.config_path, {})
        self.url = f"http://127.0.0.1:{worker_port}"
        self.processes = LocalCluster(
            self.folder / "logs", config.without_settings(os.environ) | ENVIRON | bytecode_environment()
        )
        self.on_end: Callable[[str], None] = lambda name: None
        """Called with the name of a process that ended by itself, before it is started again."""
        self._stack = ExitStack()

    @property
    def registry_url(self) -> str:
        return f"http://127.0.0.1:{self._registry_port}"

    def __enter__(self) -> "Cluster":
        self._stack.enter_context(self.processes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def start(self, name: str) -> None:
        """Start a process and return; only the broker is waited for."""
        match name:
            case "broker":
                broker = load_local_broker().start(self._broker_port, self.folder / "kafka")
                self.processes.adopt(BROKER, broker.process)
            case "registry":
                self.processes.start(REGISTRY, self._mlflow())
            case _:
                self.processes.start(name, service_command(name, self.config_path))

    def start_all(self) -> None:
        """Start registry, broker and services, each when the one before is ready; return when all are."""
        for name in (REGISTRY, BROKER, *SERVICES):
            self.start(name)
            self.wait_until_ready([name])

    def wait_until_ready(self, names: Sequence[str]) -> None:
        """Wait, and restart what ends meanwhile. Raises ServiceFailed when it takes too long."""
        for name in names:
            self.wait_for(lambda name=name: self.is_ready(name), f"ready {name}", START_TIMEOUT_S)  # type: ignore[misc]

    def wait_for(self, is_true: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait, and restart what ends meanwhile. Raises ServiceFailed when it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > deadline:
                raise ServiceFailed(f"no {what} within {timeout_s:.0f} s; see the logs in {self.folder / 'logs'}")
            self.supervise(time.monotonic() + 0.2)

    def is_ready(self, name: str) -> bool:
        """Return whether the process does its work."""
        if not self.processes.is_running(name):
            return False
        match name:
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
        for child in self.processes.children("distiller"):
            try:
                if ACTOR in " ".join(child.cmdline()):
                    return child
            except psutil.Error:
                continue
        return None

    def kill(self, name: str) -> None:
        """SIGKILL a process. `actor` is the one that learns, `distiller` the one that started it."""
        match name:
            case "actor":
                if (actor := self.actor()) is not None:
                    actor.kill()
                    psutil.wait_procs([actor], timeout=STOPPED_S)
            case "registry":
                self.processes.kill_session(REGISTRY)
            case _:
                self.processes.kill(name)

    def restart_ended(self) -> list[str]:
        """Start every process again that ended by itself, as a supervisor would; return their names."""
        ended = self.processes.ended()
        for name in ended:
            self.on_end(name)
            self.start(name)
        return ended

    def supervise(self, until_s: float) -> list[str]:
        """Run `restart_ended` until `until_s` of the monotonic clock; return the names."""
        ended: list[str] = []
        while True:
            ended += self.restart_ended()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return ended
            time.sleep(min(0.1, left_s))

    def _mlflow(self) -> list[str]:
        store = f"sqlite:///{self.folder}/mlflow.db"
        stores = ["--backend-store-uri", store, "--artifacts-destination", str(self.folder / "artifacts")]
        address = ["--host", "127.0.0.1", "--port", str(self._registry_port), "--workers", "1"]
        return [sys.executable, "-m", "mlflow", "server", *stores, *address]


def load_local_broker() -> ModuleType:
    """Import deploy/kafka/local_broker.py, which is a program and not part of a package."""
    name = "omnidraft_local_broker"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, LOCAL_BROKER)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def tiny_settings(folder: Path) -> str:
    """Return settings of a fleet around two tiny random models, quick enough to be killed a hundred times."""
    models = tiny_models(folder)
    return f"""\
[models]
target = "{models["target"]}"
drafter = "{models["drafter"]}"
precision = "float32"
drafter_precision = "float32"
[decode]
threads = 1
prefill_rows = 16
mode = "reproducible"
[learner]
records_per_step = 4
steps_per_snapshot = 8
held_out_every = 8
learning_rate = 1e-3
threads = 1
nice = 5
[controller]
poll_s = 0.5
tolerance = 1.0
[worker]
poll_s = 0.5
"""
