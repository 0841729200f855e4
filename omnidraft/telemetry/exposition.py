"""`/metrics` for Prometheus: of a process without an HTTP server of its own, and of one that answers for several."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from omnidraft.allowed_hosts import MISDIRECTED, is_allowed
from omnidraft.config import MetricsSettings

logger = logging.getLogger(__name__)


class Exposition:
    """An HTTP server for `/metrics`, in a thread of its own."""

    def __init__(
        self, registry: CollectorRegistry, settings: MetricsSettings, port: int, allowed_hosts: Collection[str] = ()
    ) -> None:
        """Serve the registry; if the port is taken, only log a warning: a service does not stop for its metrics.

        Args:
            allowed_hosts: see `worker.allowed_hosts`.
        """
        self.port: int | None = None
        self._server = None
        try:
            self._server, self._thread = start_http_server(port, settings.host, registry)
        except OSError as exc:
            logger.warning("no metrics at %s:%d, go on without: %s", settings.host, port, exc)
            return
        app, names = self._server.get_app(), (*allowed_hosts, settings.host.lower())
        assert app is not None
        self._server.set_app(_checking_host(app, names))
        self.port = self._server.server_port
        logger.info("metrics at http://%s:%d/metrics", settings.host, self.port)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _checking_host(app: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """Return the WSGI application with an answer of 421 to names that are not allowed."""

    def checking(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if is_allowed(environ.get("HTTP_HOST"), names):
            return app(environ, start_response)  # type: ignore[no-any-return]
        status = HTTPStatus.MISDIRECTED_REQUEST
        start_response(f"{status} {status.phrase}", [("Content-Type", "text/plain")])
        return [MISDIRECTED.encode()]

    return checking


class MergedCollector(Collector):
    """The metrics that several processes rendered, in one registry; nothing is added up."""

    def __init__(self, label: str, rendered: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """
        Args:
            label: samples without it get the name of their process as its value.
            rendered: called at every scrape; returns the name and the text of each process.
        """
        self._label, self._rendered = label, rendered

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, text in self._rendered():
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [one._replace(labels={self._label: name, **one.labels}) for one in family.samples]
        yield from families.values()


def merge_scrapes(label: str, rendered: Iterable[tuple[str, str]]) -> bytes:
    """Return the scrapes of several processes, given by name and text, as one text in the same format."""
    registry, texts = CollectorRegistry(), tuple(rendered)
    registry.register(MergedCollector(label, lambda: texts))
    return generate_latest(registry)
