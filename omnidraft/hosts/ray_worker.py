"""A decoding worker as a Ray Serve replica: the engine of one target, its HTTP application, and its refresher.

Serve starts one process per replica, asks `check_health`, and calls `__del__` when the replica has to go: then what was
accepted is finished and the traces are drained. Each replica follows the announcements by itself, as a worker does.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from omnidraft.config import Settings
from omnidraft.hosts.asgi_bridge import Head, HttpCall, respond
from omnidraft.hosts.process import configure_logging, settle
from omnidraft.hosts.worker_threads import refresher_threads, vital_parts
from omnidraft.supervised_thread import first_problem

logger = logging.getLogger(__name__)


class ReplicaUnhealthy(Exception):
    """Serve has to replace this replica."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Where one replica stands."""

    worker: str
    """Its name in trace records."""
    target: str
    snapshot_version: int | None
    """None: the base drafter."""
    snapshot_id: str


class DecodeReplica:
    """Serves `models.target` of its settings, which are all it is given."""

    _is_open = False
    """One that could not be made has nothing to close."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            OmnidraftError: model, log or registry cannot be used.
        """
        from omnidraft import wiring
        from omnidraft.serving.app import ServedModel, application
        from omnidraft.serving.request_queue import RequestQueue
        from omnidraft.serving.telemetry_middleware import TelemetryMiddleware
        from omnidraft.telemetry.metric_definitions import WORKER
        from omnidraft.telemetry.metrics import PrometheusMetrics

        configure_logging(f"worker for {settings.models.target}")
        self._settings = settings
        self._metrics = PrometheusMetrics(WORKER, settings.models.targets)
        self._tracing = wiring.tracing(settings, "worker", self._metrics)
        self._worker = wiring.worker(settings, self._metrics, tracing=self._tracing)
        self._requests = RequestQueue(self._metrics, max_waiting=settings.worker.max_queue)
        served = [ServedModel(each.engine, each.target.fingerprint) for each in self._worker.served]
        self._stop = threading.Event()
        self._refreshers = refresher_threads(self._worker, self._stop)
        self._vital = vital_parts(self._worker, self._refreshers)
        self._app = application(self._requests, served, settings.worker, self._metrics.render, self._vital)
        self._observed = TelemetryMiddleware(self._app, self._metrics, self._tracing)
        settle()
        self._lifespan = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._has_started = False
        for thread in self._refreshers:
            thread.start()
        self._is_open = True

    async def respond(self, call: HttpCall) -> AsyncGenerator[Head | bytes, None]:
        """What the worker's own HTTP server would answer, as frames."""
        await self._start_app()
        async with aclosing(respond(self._observed, call)) as frames:
            async for frame in frames:
                yield frame

    def facts(self) -> ReplicaFacts:
        """Whom it is and what it serves with."""
        engine = self._worker.engine
        current = engine.slot.current
        return ReplicaFacts(engine.pair.worker, engine.pair.target, current.version, current.snapshot_id)

    def metrics_text(self) -> tuple[str, bytes]:
        """Its name, and what a scrape gets."""
        return self._worker.engine.pair.worker, self._metrics.render()

    def check_health(self) -> None:
        """Raises ReplicaUnhealthy."""
        if problem := first_problem((self._requests, *self._vital)):
            raise ReplicaUnhealthy(problem)

    def __del__(self) -> None:
        """Serve has stopped sending requests, and calls this. Finish those there are, drain the traces, end."""
        if self._is_open:
            self._is_open = False
            self._close()

    async def _start_app(self) -> None:
        """Once, in the event loop in which requests run."""
        async with self._starting:
            if not self._has_started:
                await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
                self._has_started = True

    def _close(self) -> None:
        drain_s = self._settings.recorder.drain_timeout_s
        self._stop.set()
        self._requests.close(self._settings.worker.drain_timeout_s)
        for thread in self._refreshers:
            thread.join(drain_s)
        if self._worker.recorder is not None:
            self._worker.recorder.close(drain_s)
        self._tracing.close(self._settings.tracing.timeout_s)
        logger.info("stopped")
