"""The controller as a process: decides which snapshot serves each target, until SIGTERM or SIGINT."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing

from omnidraft import assembly
from omnidraft.config import Settings
from omnidraft.hosts.process import stop_on_signals
from omnidraft.telemetry.exposition import Exposition
from omnidraft.telemetry.metric_definitions import CONTROLLER
from omnidraft.telemetry.metrics import PrometheusMetrics


def main(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the exit code.

    Raises:
        OmnidraftError: the log or the registry cannot be used.
        LeaseLost: another controller decides.
    """
    metrics = PrometheusMetrics(CONTROLLER, settings.models.targets)
    controllers = [assembly.controller(settings.for_target(target), metrics) for target in settings.models.targets]
    stop = stop_on_signals()
    port, hosts = settings.metrics.controller_port, settings.worker.allowed_hosts
    with closing(Exposition(metrics.registry, settings.metrics, port, hosts)):
        _run_together([controller.run for controller in controllers], stop)
    return 0


def _run_together(runs: Sequence[Callable[[threading.Event], None]], stop: threading.Event) -> None:
    """Run each in a thread of its own; when one fails, stop all and raise its error."""
    with ThreadPoolExecutor(len(runs), thread_name_prefix="controller") as threads:
        try:
            for ended in as_completed([threads.submit(run, stop) for run in runs]):
                ended.result()
        finally:
            stop.set()
