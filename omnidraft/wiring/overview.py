"""Where the fleet of these settings stands; nothing is made or changed by asking."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.wiring.logs import existing_registry, log_reader, topics

if TYPE_CHECKING:
    from omnidraft.fleet.overview import Overview


def overview(settings: Settings, workers: Sequence[str] = ()) -> "Overview":
    """Of all targets of the settings; what does not answer is told in it.

    Args:
        workers: their URLs; none means the one that the settings describe.
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
    """Where the worker of these settings is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.worker.host, settings.worker.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.worker.port}"
