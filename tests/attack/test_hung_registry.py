"""A registry that hangs: orders and alarms, which need none, are in effect within seconds all the same."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from omnidraft import assembly, config
from omnidraft.assembly.registries import snapshot_reader
from omnidraft.config import WorkerSettings
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.updater import SnapshotUpdater
from omnidraft.errors import RegistryError
from omnidraft.ports import Champion, Drift, Forget, Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from tests.tiny_engine import PATIENCE_S
from tests.trace_records import make_record


class HungMlflow(ThreadingHTTPServer):
    """Answers until `hangs` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hangs, self.is_over = Event(), Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HungMlflow

    def do_GET(self) -> None:
        if self.server.hangs.is_set():
            self.server.is_over.wait()
            return
        is_search = "/search" in self.path
        body = b"{}" if is_search else b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}'
        self.send_response(200 if is_search else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args: object) -> None: ...


@contextmanager
def hung_mlflow() -> Iterator[HungMlflow]:
    """A server that answers at first."""
    with HungMlflow() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()


IN_EFFECT_S = 3.0


@pytest.fixture
def mlflow() -> Iterator[HungMlflow]:
    with hung_mlflow() as server:
        yield server


@pytest.fixture
def settings(mlflow: HungMlflow, tmp_path: Path) -> config.Settings:
    sections = {"log": {"url": f"sqlite:///{tmp_path}/log.db"}}
    models = {"target": "big", "drafter": "org/small"}
    return config.load(None, {}, models=models, registry={"url": mlflow.url}, **sections)


@contextmanager
def running(run: Callable[[threading.Event], None], mlflow: HungMlflow) -> Iterator[None]:
    """In a thread of its own, until the server ends its calls."""
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        mlflow.is_over.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def is_soon(reached: Callable[[], bool]) -> bool:
    until = time.monotonic() + IN_EFFECT_S
    while time.monotonic() < until:
        if reached():
            return True
        time.sleep(0.02)
    return False


class Worker:
    """A worker's updater as wired, whose snapshots 1 and 2 are in memory; 2 serves."""

    def __init__(self, settings: config.Settings, staging: Path) -> None:
        self.fleet = assembly.control_log(settings, CountingMetrics())
        self.num_forgotten = 0
        self.slot = SnapshotSlot(self.snapshot(1))
        self.slot.swap(self.snapshot(2))
        self.updater = SnapshotUpdater(
            snapshot_reader(settings),
            self.slot,
            lambda version, folder: self.snapshot(version.version),
            assembly.control_log(settings, CountingMetrics()),
            WorkerSettings(poll_s=0.05),
            CountingMetrics(),
            target="big",
            staging=staging,
            forget=self.forget,
        )

    @staticmethod
    def snapshot(version: int) -> LoadedSnapshot:
        return LoadedSnapshot(version, f"s{version}", object(), None, None)

    def forget(self) -> None:
        self.num_forgotten += 1

    def is_forgetting_and_rolling_back(self) -> bool:
        """Order both; return whether each is in effect soon."""
        self.fleet.put(("forget", "t"), Forget(id="order", until_ms=1))
        is_forgotten = is_soon(lambda: self.num_forgotten == 1 and self.slot.rules.was_forgotten_since("t", 1))
        self.fleet.put(("champion",), Champion(version=1))
        return is_forgotten and is_soon(lambda: self.slot.current.version == 1)


@pytest.fixture
def worker(settings: config.Settings, tmp_path: Path) -> Worker:
    return Worker(settings, tmp_path / "staging")


def test_a_worker_forgets_and_rolls_back_while_the_registry_hangs(worker: Worker, mlflow: HungMlflow) -> None:
    mlflow.hangs.set()
    with running(worker.updater.run, mlflow):
        time.sleep(0.5)  # it asks for the champion
        assert worker.is_forgetting_and_rolling_back()


def test_a_worker_forgets_and_rolls_back_while_a_snapshot_is_loaded(worker: Worker, mlflow: HungMlflow) -> None:
    """The one that is loaded for an order that was overtaken never serves."""
    worker.updater.step(threading.Event())  # which opens the registry
    mlflow.hangs.set()
    worker.fleet.put(("champion",), Champion(version=3))
    with running(worker.updater.run, mlflow):
        time.sleep(0.5)
        assert worker.is_forgetting_and_rolling_back()
    assert worker.slot.current.version == 1


def serve(settings: config.Settings, name: str, *, number: int, is_good: bool) -> None:
    """Records whose first candidates are all right or all wrong."""
    traces = assembly.log_writer(settings, settings.log.traces_topic)
    for count in range(number):
        record = make_record(f"{name}-{count}", num_emitted=60, target="big", drafter="org/small")
        record.rounds.accepted_M[::2] = is_good
        record.rounds.num_accepted_R[:] = is_good
        traces.append([Outgoing(codec.key(record), codec.encode(record), codec.headers(record))])
    traces.close()


@pytest.mark.parametrize("is_gone", [False, True], ids=["hangs", "is gone"])
def test_a_controller_announces_a_drift_while_the_registry_hangs_or_is_gone(
    settings: config.Settings, mlflow: HungMlflow, is_gone: bool
) -> None:
    metrics = CountingMetrics()
    controller = assembly.controller(settings, metrics)
    controller.step()
    serve(settings, "before", number=80, is_good=True)
    controller.step()
    if is_gone:
        mlflow.shutdown()
        mlflow.server_close()
    mlflow.hangs.set()
    follower = assembly.control_log(settings, metrics)
    with running(controller.run, mlflow):
        time.sleep(0.5)  # it asks for the challenger
        serve(settings, "after", number=20, is_good=False)
        assert is_soon(lambda: bool(follower.poll(0.0)[0].of(Drift)))


def test_a_read_of_a_server_that_hangs_fails_after_seconds_however_long_uploads_may_take(
    settings: config.Settings, mlflow: HungMlflow
) -> None:
    registry = assembly.registry(settings)
    assert registry.versions() == ()
    mlflow.hangs.set()
    with pytest.raises(RegistryError, match="no answer within 5 s"):
        registry.resolve("champion")
