"""Throttling of background work in a decoding process: short pieces with sleeps or waits in between.

A pass computes on every core and waits for the slowest one, many times. So background work with merely a low priority
still delays each pass: once it runs, the scheduler lets it finish a time slice of milliseconds.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

NICENESS = 10
"""That of learning, so that requests come first on a shared machine; with nobody beside it, it costs nothing."""
_HIGHEST_NICENESS = 19
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


def give_way() -> None:
    """Let whoever else computes on this machine go first from now on, where this thread calls `rest` every few
    milliseconds: it works at its pace while nobody wants its processor, a piece every two seconds else.

    A priority would not do. Linux gives every session the same share, whatever the niceness of its processes (sched(7),
    autogroups), so this process starts one with the least weight; and each time slice of it would hold up a pass.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _HIGHEST_NICENESS)
    with suppress(OSError):  # it leads a group of processes, or this system has no autogroups
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(_HIGHEST_NICENESS))
    _gate.set(_Courtesy())


class _Courtesy:
    """A gate that pauses when the work before it had to wait for its processor."""

    _WORK_S = 0.02
    _PAUSE_S = 2.0
    _MOST_WAITING = 0.2
    """Of the time of work; what shares its processor with another waits for half of it and more."""

    def __init__(self) -> None:
        self._resume()

    def __call__(self) -> None:
        elapsed_s = time.monotonic() - self._resumed_s
        if elapsed_s < self._WORK_S:
            return
        if elapsed_s - (time.thread_time() - self._computed_s) > self._MOST_WAITING * elapsed_s:
            time.sleep(self._PAUSE_S)
        self._resume()

    def _resume(self) -> None:
        self._resumed_s, self._computed_s = time.monotonic(), time.thread_time()
