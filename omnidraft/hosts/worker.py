"""The decoding worker as a process: an HTTP server before one engine, following the champion."""

import logging
import threading

import uvicorn

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.hosts.process import stop_on_signals
from omnidraft.serving.app import application
from omnidraft.serving.queue import RequestQueue
from omnidraft.telemetry.metrics import PrometheusMetrics

logger = logging.getLogger(__name__)


def main(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT: then finish accepted requests, drain the traces, and go.

    Raises:
        OmnidraftError: models, log or registry cannot be used.
    """
    metrics = PrometheusMetrics()
    worker = wiring.worker(settings, metrics)
    requests = RequestQueue(worker.engine, metrics, max_waiting=settings.worker.max_queue)
    model, fingerprint = settings.models.target, worker.target.fingerprint
    app = application(requests, model, fingerprint, settings.worker, metrics.render)
    config = uvicorn.Config(app, host=settings.worker.host, port=settings.worker.port, log_level="warning")
    server = uvicorn.Server(config)
    stop = stop_on_signals()
    threads = [threading.Thread(target=server.run, name="http")]
    if worker.refresher is not None:
        threads.append(threading.Thread(target=worker.refresher.run, args=(stop,), name="refresher"))
    for thread in threads:
        thread.start()
    logger.info("serving %s on http://%s:%d", model, settings.worker.host, settings.worker.port)
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
    logger.info("stopped")
    return 1 if has_failed else 0
