"""Throttling of background work in a decoding process: short pieces with sleeps or waits in between.

A pass computes on every core and waits for the slowest one, many times. So background work with merely a low priority
still delays each pass: once it runs, the scheduler lets it finish a time slice of milliseconds.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from omnidraft.system import default_home

NICENESS = 10
"""That of learning, so that requests come first on a shared machine; with nobody beside it, it costs nothing."""
_PIECE_S = 0.002
"""The shortest piece of work that is followed by a sleep."""
_SHARE = 0.2
"""The share of one core that throttled work takes."""
_ROUND_S = 0.5
"""Decoding goes on if its newest round began so long ago: longer than nearly all rounds take."""

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


def start_session() -> None:
    """Let this process, and those that it starts, leave others of the machine more of its processors.

    Linux gives every session the same share, whatever the niceness of its processes (sched(7), autogroups), so this
    starts one. Containers have shares of their own, which nothing inside changes.
    """
    lower_priority()
    with suppress(OSError):  # it leads a group of processes, or this system has no autogroups
        if os.getsid(0) != os.getpid():
            os.setsid()
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def give_way() -> None:
    """Let others go first from now on: other processes by a low priority, and decoding wherever this thread calls
    `rest`, which does a piece of work every two seconds beside it."""
    start_session()
    _gate.set(Courtesy(2.0))


class Courtesy:
    """A gate that pauses after each piece of work while texts are decoded on this machine: a low priority alone would
    hold up a pass for each of its time slices."""

    _WORK_S = 0.02
    """The shortest piece of work that is followed by a pause."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s, self._resumed_s = pause_s, time.monotonic()

    def __call__(self) -> None:
        """Return at once where nothing is decoded, or the piece is short; else after a pause."""
        if time.monotonic() - self._resumed_s < self._WORK_S:
            return
        if decodes():
            time.sleep(self._pause_s)
        self._resumed_s = time.monotonic()


def note_round() -> None:
    """Let all processes of this user know that a round of decoding begins now, unless this thread is gated itself."""
    if _gate.get() is None and (newest := _newest_round()) is not None:
        newest[:] = struct.pack("d", time.monotonic())


def decodes() -> bool:
    """Return whether a process of this user decodes texts on this machine."""
    newest = _newest_round()
    return newest is not None and 0 <= time.monotonic() - struct.unpack("d", newest[:])[0] < _ROUND_S


@cache
def _newest_round() -> mmap.mmap | None:
    """Return the memory that all processes of one home share, with the time of the newest round, in seconds since the
    start of the machine; None where the home cannot be written."""
    path = default_home() / "newest-round"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.truncate(struct.calcsize("d"))
            return mmap.mmap(file.fileno(), 0)
    return None
