"""The status of the fleet of these settings, read without creating or changing anything."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.wiring.logs import existing_registry, log_reader, topics

if TYPE_CHECKING:
    from omnidraft.fleet.overview import Overview


def overview(settings: Settings, workers: Sequence[str] = ()) -> "Overview":
    """Return the status of all targets and workers; services that do not answer are among its problems.

    Args:
        workers: their URLs; empty means the worker that the settings describe.
    """
    from omnidraft.fleet.overview import OverviewSources
    from omnidraft.fleet.overview import overview as gather
    from omnidraft.fleet.workers import worker_status
    from omnidraft.telemetry.metrics import CountingMetrics

    sources = OverviewSources(
        registry=lambda target: existing_registry(settings.for_target(target)),
        topics=lambda: topics(settings),
        reader=lambda topic: log_reader(settings, topic),
        worker=worker_status,
    )
    urls = tuple(workers) or (worker_url(settings),)
    return gather(sources, settings, CountingMetrics(), urls, time.time_ns() // 1_000_000)


def worker_url(settings: Settings) -> str:
    """Return the URL of the worker of these settings, seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.worker.host, settings.worker.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.worker.port}"
