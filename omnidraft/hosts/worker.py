"""The decoding worker as a process: an HTTP server in front of one engine for each target."""

import logging
import socket
import threading

from omnidraft.config import Settings, WorkerSettings
from omnidraft.errors import ConfigError
from omnidraft.hosts.http_server import http_server
from omnidraft.hosts.process import stop_on_signals
from omnidraft.hosts.worker_runtime import WorkerRuntime

logger = logging.getLogger(__name__)


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
    worker = WorkerRuntime(settings)
    stop_on_signals(worker.stop)
    server = http_server(worker.traced_app, settings.worker)
    http = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    worker.start()
    http.start()
    host, port = listener.getsockname()[:2]
    logger.info("serving %s on http://%s:%d", ", ".join(settings.models.targets), host, port)
    while not worker.stop.wait(0.2) and http.is_alive():
        pass
    has_failed = not worker.stop.is_set()
    worker.drain()
    server.should_exit = True
    http.join(settings.recorder.drain_timeout_s)
    worker.close()
    return 1 if has_failed else 0


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
