"""The decoding worker: what runs in it whatever its transport, and the process that serves it over HTTP.

`ray_serve.py` runs the same as replicas of Ray Serve.
"""

import logging
import socket
import threading
from contextlib import suppress
from functools import partial

from omnidraft import __version__, assembly
from omnidraft.config import Settings, WorkerSettings
from omnidraft.decode.recording.trace_producer import DRAIN_S
from omnidraft.errors import BusError, ConfigError
from omnidraft.hosts.http_server import http_server
from omnidraft.hosts.process import end_at_once_on_interrupt, freeze_loaded_objects, stop_on_signals
from omnidraft.ports import WORKER_NEWS_S, WorkerNews
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.telemetry_middleware import TelemetryMiddleware
from omnidraft.telemetry.metric_definitions import WORKER
from omnidraft.telemetry.metrics import PrometheusMetrics
from omnidraft.threads import Supervised, SupervisedThread

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
        self._tracing = assembly.tracing(settings, "worker", self.metrics)
        self._worker = assembly.worker(settings, self.metrics, tracing=self._tracing)
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
        self._announcing: threading.Thread | None = None
        self.vital: tuple[Supervised, ...] = (self._requests, *threads)
        """Without each of these the worker is not healthy."""
        served = [
            ServedModel(each.engine, each.target.fingerprint, assembly.receipt_signer(settings, each.identity))
            for each in self._worker.served
        ]
        self.app = application(self._requests, served, settings.worker, self.metrics.render, threads)
        self.traced_app = TelemetryMiddleware(self.app, self.metrics, self._tracing)
        """The application as requests reach it, with metrics and spans."""

    def start(self, address: str | None = None) -> None:
        """Start following the control log, and telling it what serves here, at this URL if others reach it. Call it
        when all that stays in memory is loaded."""
        freeze_loaded_objects()
        for thread in self._updaters:
            thread.start()
        if self._updaters:
            self._announcing = threading.Thread(target=self._announce, args=(address,), name="news", daemon=True)
            self._announcing.start()

    def _announce(self, address: str | None) -> None:
        """Put what serves here on the control log again and again, in a thread that may wait for the log."""
        control, key = assembly.control_log(self._settings, self.metrics), ("worker", self.engine.pair.worker)
        has_failed = False
        while not self.stop.is_set():
            serves = {each.engine.pair.target: each.engine.slot.current.version for each in self._worker.served}
            try:
                control.put(key, WorkerNews(address=address, release=__version__, serves=serves))
            except BusError as exc:
                if not has_failed:
                    logger.warning("`omnidraft status` does not list this worker: %s", exc)
                has_failed = True
            self.stop.wait(WORKER_NEWS_S)
        with suppress(BusError):
            control.put(key, None, "it was stopped")
            control.close()

    def drain(self) -> None:
        """Refuse new requests and finish accepted ones; what is not finished by `worker.drain_timeout_s` fails."""
        self.stop.set()
        self._requests.close(self._settings.worker.drain_timeout_s)

    def close(self) -> None:
        """Stop the threads and flush traces and spans, after `drain`."""
        for thread in self._updaters:
            thread.join(DRAIN_S)
        if self._worker.producer is not None:
            self._worker.producer.close()
        if self._announcing is not None:
            self._announcing.join(DRAIN_S)
        self._tracing.close()
        logger.info("stopped")


def main(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then finish accepted requests, flush the traces, and return the exit code.

    Meanwhile `/readyz` and every new request answer 503; what is not finished by `worker.drain_timeout_s` ends with an
    error.

    Raises:
        OmnidraftError: models, log or registry cannot be used, or the address cannot be listened on.
    """
    with _listening(settings.worker) as listener:  # before anything large is loaded
        return _serve(settings, listener)


def _serve(settings: Settings, listener: socket.socket) -> int:
    end_at_once_on_interrupt("loading")  # which threads do, and nothing is accepted yet
    worker = WorkerRuntime(settings)
    stop_on_signals(worker.stop)
    server = http_server(worker.traced_app, settings.worker)
    http = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    host, port = listener.getsockname()[:2]
    worker.start(_address(host, port))
    http.start()
    logger.info("serving %s on http://%s:%d", ", ".join(settings.models.targets), host, port)
    if settings.worker.page:
        logger.info("ask and watch: http://%s:%d/", host, port)
    while not worker.stop.wait(0.2) and http.is_alive():
        pass
    has_failed = not worker.stop.is_set()
    worker.drain()
    server.should_exit = True
    http.join(DRAIN_S)
    worker.close()
    return 1 if has_failed else 0


def _address(host: str, port: int) -> str:
    """Return the URL at which others reach a worker that listens there."""
    if host in ("0.0.0.0", "::"):
        try:
            host = socket.gethostbyname(socket.gethostname())
        except OSError:
            host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _listening(settings: WorkerSettings) -> socket.socket:
    """Return a bound socket. Raises ConfigError when the address cannot be used."""
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
