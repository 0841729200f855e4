"""A decoding worker without its transport: the engines, the HTTP application, and the threads beside them.

`worker.py` serves it over HTTP, `ray_worker.py` as a Ray Serve replica.
"""

import logging
import threading
from functools import partial

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.hosts.process import freeze_loaded_objects
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.telemetry_middleware import TelemetryMiddleware
from omnidraft.supervised_thread import Supervised, SupervisedThread
from omnidraft.telemetry.metric_definitions import WORKER
from omnidraft.telemetry.metrics import PrometheusMetrics

logger = logging.getLogger(__name__)


class WorkerRuntime:
    """All that a worker runs. Use: make it, `start`, and at the end `drain` and `close`, each once."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            OmnidraftError: models, log or registry cannot be used.
        """
        self._settings = settings
        self.metrics = PrometheusMetrics(WORKER, settings.models.targets)
        self._tracing = wiring.tracing(settings, "worker", self.metrics)
        self._worker = wiring.worker(settings, self.metrics, tracing=self._tracing)
        self.engine = self._worker.engine
        """The engine of `models.target`."""
        self._requests = RequestQueue(self.metrics, max_waiting=settings.worker.max_queue)
        self.stop = threading.Event()
        """Set by `drain`; whoever sets it earlier ends the updater threads."""
        self._updaters = [
            SupervisedThread(partial(updater.run, self.stop), name=f"refresher of {name}", is_over=self.stop.is_set)
            for name, updater in ((each.engine.pair.target, each.updater) for each in self._worker.served)
            if updater is not None
        ]
        producer = self._worker.producer
        threads: list[Supervised] = [*self._updaters, *([producer] if producer is not None else [])]
        self.vital: tuple[Supervised, ...] = (self._requests, *threads)
        """Without each of these the worker is not healthy."""
        served = [ServedModel(each.engine, each.target.fingerprint) for each in self._worker.served]
        self.app = application(self._requests, served, settings.worker, self.metrics.render, threads)
        self.traced_app = TelemetryMiddleware(self.app, self.metrics, self._tracing)
        """The application as requests reach it, with metrics and spans."""

    def start(self) -> None:
        """Start following the announcements. Call it when all that stays in memory is loaded."""
        freeze_loaded_objects()
        for thread in self._updaters:
            thread.start()

    def drain(self) -> None:
        """Refuse new requests and finish accepted ones; what is not finished by `worker.drain_timeout_s` fails."""
        self.stop.set()
        self._requests.close(self._settings.worker.drain_timeout_s)

    def close(self) -> None:
        """Stop the threads and flush traces and spans, after `drain`."""
        drain_s = self._settings.recorder.drain_timeout_s
        for thread in self._updaters:
            thread.join(drain_s)
        if self._worker.producer is not None:
            self._worker.producer.close(drain_s)
        self._tracing.close(self._settings.tracing.timeout_s)
        logger.info("stopped")
