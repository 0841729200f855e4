"""The controller as a process: decides which snapshot serves, until it is told to stop."""

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.hosts.process import stop_on_signals
from omnidraft.telemetry.metrics import CountingMetrics


def main(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the exit code.

    Raises:
        OmnidraftError: the log or the registry cannot be used.
    """
    controller = wiring.controller(settings, CountingMetrics())
    controller.run(stop_on_signals())
    return 0
