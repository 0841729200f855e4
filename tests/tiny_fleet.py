"""Worker, learner and controller over the tiny models, in threads of the test process, with metrics and spans."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from omnidraft import assembly, config
from omnidraft.decode.drafting.suffix_source import FleetMemory, SuffixSource
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.ports import Proposer, Registry
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.telemetry_middleware import TelemetryMiddleware
from omnidraft.telemetry.exposition import Exposition
from omnidraft.telemetry.metric_definitions import CONTROLLER, DISTILLER, WORKER
from omnidraft.telemetry.metrics import PrometheusMetrics
from tests.http_server import served, threads_until_over
from tests.tiny_engine import PATIENCE_S, tiny_settings

LEARNER = {"records_per_step": 2, "steps_per_snapshot": 2, "held_out_every": 3, "learning_rate": 1e-3}
PROMPT = "How many clips did Natalia sell"


def memory_of(worker: assembly.Worker) -> FleetMemory:
    """Return the fleet's memory in the snapshot that serves."""
    return memory_in(worker.engine.slot.current.proposer)


def memory_in(proposer: Proposer) -> FleetMemory:
    """Return the fleet's memory that a proposer drafts from."""
    assert isinstance(proposer, TreeProposer)
    (source,) = [each for each in proposer.sources if isinstance(each, SuffixSource)]
    return source.fleet


@dataclass
class Fleet:
    """What runs, and where it answers."""

    settings: config.Settings
    worker: assembly.Worker
    url: str
    ports: dict[str, int]
    """Job of Prometheus -> port on the loopback interface."""

    @property
    def registry(self) -> Registry:
        return assembly.registry(self.settings)

    def ask(self, *, seed: int = 3, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
        asked = {"prompt": PROMPT, "max_tokens": 24, "seed": seed, "temperature": 0.0} | body
        return httpx.post(f"{self.url}/v1/completions", json=asked, headers=headers, timeout=PATIENCE_S)

    def ask_until(self, is_enough: Callable[[], bool], timeout_s: float) -> None:
        """Ask one question after the other, of which some are held out."""
        deadline, seed = time.monotonic() + timeout_s, 0
        while not is_enough():
            assert time.monotonic() < deadline, "it never came"
            self.ask(prompt=f"{PROMPT} {seed}", seed=seed, temperature=1.0).raise_for_status()
            seed += 1


def fleet_settings(models: tuple[Path, Path], folder: Path, **sections: dict[str, object]) -> config.Settings:
    """A fleet that learns a step every two records and promotes whatever comes."""
    given: dict[str, dict[str, object]] = {
        "log": {"url": f"sqlite:///{folder}/log.db"},
        "registry": {"url": f"directory:///{folder}/registry"},
        "learner": dict(LEARNER),
        "controller": {"tolerance": 1.0, "speed_tolerance": 1000.0},
        "worker": {"poll_s": 0.1, "max_queue": 2},
        "metrics": {"distiller_port": 0, "controller_port": 0},
    }
    return tiny_settings(models, **(given | sections))


@contextmanager
def running_fleet(settings: config.Settings, folder: Path) -> Iterator[Fleet]:
    """`OMNIDRAFT_HOME` is set. All parts end in their order: requests, worker, learner, controller."""
    with ExitStack() as parts:
        controller_port = parts.enter_context(_controller(settings))
        distiller_port = parts.enter_context(_learner(settings, folder))
        worker, url = parts.enter_context(_worker(settings))
        ports = {"omnidraft-worker": httpx.URL(url).port or 0}
        ports |= {"omnidraft-distiller": distiller_port, "omnidraft-controller": controller_port}
        yield Fleet(settings, worker, url, ports)


@contextmanager
def _worker(settings: config.Settings) -> Iterator[tuple[assembly.Worker, str]]:
    metrics = PrometheusMetrics(WORKER, settings.models.targets)
    tracing = assembly.tracing(settings, "worker", metrics)
    worker = assembly.worker(settings, metrics, tracing=tracing)
    requests = RequestQueue(metrics, max_waiting=settings.worker.max_queue)
    models = [ServedModel(each.engine, each.target.fingerprint) for each in worker.served]
    app = TelemetryMiddleware(application(requests, models, settings.worker, metrics.render), metrics, tracing)
    refreshers = [each.updater for each in worker.served if each.updater is not None]
    with served(app) as url, threads_until_over(*(refresher.run for refresher in refreshers)):
        yield worker, url
        requests.close(PATIENCE_S)
    assert worker.producer is not None
    worker.producer.close(PATIENCE_S)
    tracing.close()


@contextmanager
def _learner(settings: config.Settings, folder: Path) -> Iterator[int]:
    metrics = PrometheusMetrics(DISTILLER, settings.models.targets)
    tracing = assembly.tracing(settings, "distiller", metrics)
    distillation = assembly.distillation(settings, metrics, folder=folder / "distiller", tracing=tracing)
    with (
        closing(Exposition(metrics.registry, settings.metrics, 0)) as exposition,
        threads_until_over(lambda stop: distillation.run(stop.is_set)),
    ):
        assert exposition.port is not None
        yield exposition.port
    tracing.close()


@contextmanager
def _controller(settings: config.Settings) -> Iterator[int]:
    metrics = PrometheusMetrics(CONTROLLER, settings.models.targets)
    controller = assembly.controller(settings, metrics)
    with closing(Exposition(metrics.registry, settings.metrics, 0)) as exposition, threads_until_over(controller.run):
        assert exposition.port is not None
        yield exposition.port
