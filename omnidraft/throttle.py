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


def lower_priority(niceness: int = NICENESS) -> None:
    """Lower the priority of the calling thread and of those it starts (on Linux priority belongs to a thread)."""
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def start_session(niceness: int) -> None:
    """Let this process, and those that it starts, leave others of the machine more of its processors.

    Linux gives every session the same share, whatever the niceness of its processes (sched(7), autogroups), so this
    starts one. Containers have shares of their own, which nothing inside changes.
    """
    lower_priority(niceness)
    with suppress(OSError):  # it leads a group of processes, or this system has no autogroups
        if os.getsid(0) != os.getpid():
            os.setsid()
        Path("/proc/self/autogroup").write_text(str(niceness))


def give_way() -> None:
    """Let whoever else computes on this machine go first from now on, wherever this thread calls `rest`: it works at
    its pace while nobody wants its processor, a piece every two seconds else."""
    start_session(_HIGHEST_NICENESS)
    _gate.set(Courtesy(2.0))


class Courtesy:
    """A gate that pauses when the work before it had to wait for its processor: a low priority alone would hold up a
    pass for each of its time slices."""

    _WORK_S = 0.02
    _MOST_WAITING = 0.2
    """Of the time of work; what shares its processor with another waits for half of it and more."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._resume()

    def __call__(self) -> None:
        """Return at once where the work has not gone on for long or did not wait meanwhile, else after a pause."""
        elapsed_s = time.monotonic() - self._resumed_s
        if elapsed_s < self._WORK_S:
            return
        if elapsed_s - (time.thread_time() - self._computed_s) > self._MOST_WAITING * elapsed_s:
            time.sleep(self._pause_s)
        self._resume()

    def _resume(self) -> None:
        self._resumed_s, self._computed_s = time.monotonic(), time.thread_time()
