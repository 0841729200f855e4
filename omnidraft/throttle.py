"""Long work beside decoding, done in short pieces with rests between them.

A pass computes on every core and waits for the slowest one, many times. So work beside it that merely has a low
priority still holds up each pass: once it runs, the scheduler lets it finish a slice of milliseconds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PIECE_S = 0.002
"""Shorter pieces need no rest of their own."""
_SHARE = 0.2
"""Of one core."""

_rested_s: ContextVar[float | None] = ContextVar("rested_s", default=None)
"""What this thread had computed when the last rest began; None where work is not paced."""


@contextmanager
def paced() -> Iterator[None]:
    """What runs inside, in this thread, and calls `rest` every few milliseconds, leaves most of a core to decoding."""
    token = _rested_s.set(time.thread_time())
    try:
        yield
    finally:
        _rested_s.reset(token)


def rest() -> None:
    """Called between two pieces of long work. Sleeps where the work is paced, and returns at once where it is not."""
    rested_s = _rested_s.get()
    if rested_s is None:
        return
    worked_s = time.thread_time() - rested_s
    if worked_s >= _PIECE_S:
        _rested_s.set(rested_s + worked_s)
        time.sleep(worked_s * (1 / _SHARE - 1))
