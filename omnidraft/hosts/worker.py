"""The decoding worker as a process: an HTTP server before one engine for each target, following their champions."""

import logging
import threading

import uvicorn

from omnidraft import wiring
from omnidraft.config import Settings, WorkerSettings
from omnidraft.hosts.process import stop_on_signals
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.observed import Observed
from omnidraft.serving.queue import RequestQueue
from omnidraft.telemetry.metrics import PrometheusMetrics
from omnidraft.telemetry.table import WORKER

logger = logging.getLogger(__name__)


def main(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT: then finish accepted requests, drain the traces, and go.

    Raises:
        OmnidraftError: models, log or registry cannot be used.
    """
    metrics = PrometheusMetrics(WORKER, settings.models.targets)
    tracing = wiring.tracing(settings, "worker", metrics)
    worker = wiring.worker(settings, metrics, tracing=tracing)
    requests = RequestQueue(metrics, max_waiting=settings.worker.max_queue)
    served = [ServedModel(each.engine, each.target.fingerprint) for each in worker.served]
    app = application(requests, served, settings.worker, metrics.render)
    server = uvicorn.Server(_http(Observed(app, metrics, tracing), settings.worker))
    stop = stop_on_signals()
    threads = [threading.Thread(target=server.run, name="http")]
    threads += [
        threading.Thread(target=each.refresher.run, args=(stop,), name=f"refresher of {each.engine.pair.target}")
        for each in worker.served
        if each.refresher is not None
    ]
    for thread in threads:
        thread.start()
    names = ", ".join(settings.models.targets)
    logger.info("serving %s on http://%s:%d", names, settings.worker.host, settings.worker.port)
    while not stop.wait(0.2) and threads[0].is_alive():
        pass
    has_failed = not stop.is_set()
    stop.set()
    requests.close(settings.recorder.drain_timeout_s)
    server.should_exit = True
    for thread in threads:
        thread.join(settings.recorder.drain_timeout_s)
    if worker.recorder is not None:
        worker.recorder.close(settings.recorder.drain_timeout_s)
    tracing.close(settings.tracing.timeout_s)
    logger.info("stopped")
    return 1 if has_failed else 0


def _http(app: Observed, settings: WorkerSettings) -> uvicorn.Config:
    """Without a logging of its own: its lines are written as ours."""
    return uvicorn.Config(app, host=settings.host, port=settings.port, log_level="warning", log_config=None)
