"""Throttling of background work in a decoding process: short pieces with sleeps or waits in between.

A pass computes on every core and waits for the slowest one, many times. So background work with merely a low priority
still delays each pass: once it runs, the scheduler lets it finish a time slice of milliseconds.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NICENESS = 10
"""That of learning, so that requests come first on a shared machine; with nobody beside it, it costs nothing."""
_PIECE_S = 0.002
"""The shortest piece of work that is followed by a sleep."""
_SHARE = 0.2
"""The share of one core that throttled work takes."""

_rested_s: ContextVar[float | None] = ContextVar("rested_s", default=None)
"""The thread's CPU time when its last sleep began; None where work is not throttled."""
_gate: ContextVar[Callable[[], None] | None] = ContextVar("gate", default=None)
"""What this thread calls between two pieces of work; None where nothing is to be waited for."""


@contextmanager
def throttled() -> Iterator[None]:
    """Throttle the work of this thread inside the block, which has to call `rest` every few milliseconds."""
    token = _rested_s.set(time.thread_time())
    try:
        yield
    finally:
        _rested_s.reset(token)


@contextmanager
def gated(gate: Callable[[], None]) -> Iterator[None]:
    """Call `gate` between the pieces of this thread's work inside the block; it returns when the work may go on."""
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


def rest() -> None:
    """Wait between two pieces of work if this thread is gated, and sleep if it is throttled; otherwise return at
    once."""
    gate = _gate.get()
    if gate is not None:
        gate()
    rested_s = _rested_s.get()
    if rested_s is None:
        return
    worked_s = time.thread_time() - rested_s
    if worked_s >= _PIECE_S:
        _rested_s.set(rested_s + worked_s)
        time.sleep(worked_s * (1 / _SHARE - 1))


def lower_priority() -> None:
    """Lower the priority of the calling thread and of those it starts (on Linux priority belongs to a thread)."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
