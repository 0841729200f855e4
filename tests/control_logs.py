"""Control logs over the log of a test."""

from omnidraft.fleet.control_log import ControlLog
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter


def control_over(log: MemoryLog, metrics: CountingMetrics | None = None, **options) -> ControlLog:
    """Return the control log of a pair in this log."""
    options = {"target": "big", "drafter": "org/small"} | options
    reader = options.pop("reader", lambda: MemoryReader(log, "control"))
    return ControlLog(reader, lambda: MemoryWriter(log, "control"), metrics or CountingMetrics(), **options)
