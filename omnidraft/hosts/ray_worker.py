"""A decoding worker as a Ray Serve replica: the engine of one target, its HTTP application, and its snapshot updater.

Serve starts one process per replica, calls `check_health`, and calls `__del__` when the replica is to stop: then
accepted requests are finished and the traces flushed. Each replica follows the control log by itself, as a worker
does.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from omnidraft.config import Settings
from omnidraft.hosts.asgi_bridge import HttpCall, ResponseStart, respond
from omnidraft.hosts.process import configure_logging
from omnidraft.threads import first_problem


class ReplicaUnhealthy(Exception):
    """A vital thread of this replica has ended, so Serve has to replace it."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The name of a replica and what it serves."""

    worker: str
    """Its name in trace records and metrics."""
    target: str
    snapshot_version: int | None
    """None: the base drafter."""
    snapshot_id: str


class DecodeReplica:
    """Serves `models.target` of its settings."""

    _is_open = False
    """False for a replica whose construction failed: it has nothing to close."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            OmnidraftError: model, log or registry cannot be used.
        """
        from omnidraft.hosts.worker import WorkerRuntime  # heavy: only replicas load models

        configure_logging(f"worker for {settings.models.target}")
        self._worker = WorkerRuntime(settings)
        self._lifespan = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._has_started = False
        self._worker.start()
        self._is_open = True

    async def respond(self, call: HttpCall) -> AsyncGenerator[ResponseStart | bytes, None]:
        """Yield the response of the worker's HTTP application as frames."""
        await self._start_app()
        async with aclosing(respond(self._worker.traced_app, call)) as frames:
            async for frame in frames:
                yield frame

    def facts(self) -> ReplicaStatus:
        """Return the name, target and snapshot of this replica."""
        pair, current = self._worker.engine.pair, self._worker.engine.slot.current
        return ReplicaStatus(pair.worker, pair.target, current.version, current.snapshot_id)

    def metrics_text(self) -> tuple[str, bytes]:
        """Return its name and its metrics in Prometheus' text format."""
        return self._worker.engine.pair.worker, self._worker.metrics.render()

    def check_health(self) -> None:
        """Raises ReplicaUnhealthy."""
        if problem := first_problem(self._worker.vital):
            raise ReplicaUnhealthy(problem)

    def __del__(self) -> None:
        """Finish the accepted requests and flush the traces. Serve calls this once it sends no more requests."""
        if self._is_open:
            self._is_open = False
            self._worker.drain()
            self._worker.close()

    async def _start_app(self) -> None:
        """Run the application's startup, once, in the event loop in which requests run."""
        async with self._starting:
            if not self._has_started:
                app = self._worker.app
                await self._lifespan.enter_async_context(app.router.lifespan_context(app))
                self._has_started = True
