"""Control logs over the log of a test."""

from pathlib import Path

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.errors import BusError
from omnidraft.fleet.control_log import ControlLog
from omnidraft.ports import ControlState, ControlValue, Entry, Key
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter

PAIR = {"target": "big", "drafter": "org/small"}


def control_over(log: MemoryLog, metrics: CountingMetrics | None = None, **options) -> ControlLog:
    """Return the control log of a pair in this log."""
    options = PAIR | options
    reader = options.pop("reader", lambda: MemoryReader(log, "control"))
    return ControlLog(reader, lambda: MemoryWriter(log, "control"), metrics or CountingMetrics(), **options)


def control_in(path: Path, **options) -> ControlLog:
    """Return the control log of a pair in this SQLite log."""
    open_writer = lambda: SqliteWriter(path, "control", is_compacted=True)  # noqa: E731
    return ControlLog(lambda: SqliteReader(path, "control"), open_writer, CountingMetrics(), **PAIR | options)


class Orders:
    """A follower to whom these values are told at the polls of these numbers; polls in `down` fail."""

    def __init__(self, *orders: tuple[int, Key, ControlValue | None], down: tuple[int, ...] = ()) -> None:
        self._control, self._orders, self._down = control_over(MemoryLog(1)), orders, down
        self.num_polls = -1

    def poll(self, timeout_s: float) -> tuple[ControlState, tuple[Entry, ...]]:
        self.num_polls += 1
        for number, key, value in self._orders:
            if number == self.num_polls:
                self._control.put(key, value)
        if self.num_polls in self._down:
            raise BusError("down")
        return self._control.poll(0)

    poll_all = poll
