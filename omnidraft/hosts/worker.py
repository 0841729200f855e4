"""The decoding worker as a process: an HTTP server before one engine for each target, following their champions."""

import logging
import socket
import threading

from omnidraft import wiring
from omnidraft.config import Settings, WorkerSettings
from omnidraft.errors import ConfigError
from omnidraft.hosts.http_server import http_server
from omnidraft.hosts.process import settle, stop_on_signals
from omnidraft.hosts.worker_threads import refresher_threads, vital_parts
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.telemetry_middleware import TelemetryMiddleware
from omnidraft.telemetry.metric_definitions import WORKER
from omnidraft.telemetry.metrics import PrometheusMetrics

logger = logging.getLogger(__name__)


def main(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT: then finish accepted requests, drain the traces, and go.

    Meanwhile `/readyz` is a 503 and so is every new request; what is not finished by `worker.drain_timeout_s` ends with
    an error.

    Raises:
        OmnidraftError: models, log or registry cannot be used, or the address cannot be listened on.
    """
    with _listening(settings.worker) as listener:  # before anything large is loaded
        return _serve(settings, listener)


def _serve(settings: Settings, listener: socket.socket) -> int:
    metrics = PrometheusMetrics(WORKER, settings.models.targets)
    tracing = wiring.tracing(settings, "worker", metrics)
    worker = wiring.worker(settings, metrics, tracing=tracing)
    requests = RequestQueue(metrics, max_waiting=settings.worker.max_queue)
    served = [ServedModel(each.engine, each.target.fingerprint) for each in worker.served]
    stop = stop_on_signals()
    refreshers = refresher_threads(worker, stop)
    app = application(requests, served, settings.worker, metrics.render, vital_parts(worker, refreshers))
    server = http_server(TelemetryMiddleware(app, metrics, tracing), settings.worker)
    settle()
    http = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    for thread in (http, *refreshers):
        thread.start()
    host, port = listener.getsockname()[:2]
    logger.info("serving %s on http://%s:%d", ", ".join(settings.models.targets), host, port)
    while not stop.wait(0.2) and http.is_alive():
        pass
    has_failed = not stop.is_set()
    stop.set()
    requests.close(settings.worker.drain_timeout_s)
    server.should_exit = True
    for thread in (http, *refreshers):
        thread.join(settings.recorder.drain_timeout_s)
    if worker.recorder is not None:
        worker.recorder.close(settings.recorder.drain_timeout_s)
    tracing.close(settings.tracing.timeout_s)
    logger.info("stopped")
    return 1 if has_failed else 0


def _listening(settings: WorkerSettings) -> socket.socket:
    """Raises ConfigError when nobody can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as exc:
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(f"cannot listen on {where} (worker.host and worker.port): {exc.strerror}") from exc
    return listener
