"""Long work beside decoding, done in short pieces with rests between them.

A pass computes on every core and waits for the slowest one, many times. So work beside it that merely has a low
priority still holds up each pass: once it runs, the scheduler lets it finish a slice of milliseconds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_PIECE_S = 0.002
"""Shorter pieces need no rest of their own."""


_SHARE = 0.2
"""Of one core."""


@dataclass(slots=True)
class _Pace:
    rested_s: float
    """What this thread had computed when the last rest began."""


_pace: ContextVar[_Pace | None] = ContextVar("pace", default=None)


@contextmanager
def paced() -> Iterator[None]:
    """What runs inside, in this thread, and calls `rest` every few milliseconds, leaves most of a core to decoding."""
    token = _pace.set(_Pace(time.thread_time()))
    try:
        yield
    finally:
        _pace.reset(token)


def rest() -> None:
    """Called between two pieces of long work. Sleeps where the work is paced, and returns at once where it is not."""
    pace = _pace.get()
    if pace is None:
        return
    worked_s = time.thread_time() - pace.rested_s
    if worked_s >= _PIECE_S:
        pace.rested_s += worked_s
        time.sleep(worked_s * (1 / _SHARE - 1))
