"""How many threads compute a pass: fewer while other processes keep the cores busy. It changes no bit of our kernels.

The threads of a pass wait for each other a few times a layer. One that shares its core with another process holds the
others up for a time slice of milliseconds each time, and one thread alone is then many times faster.
"""

import ctypes
import time
from collections.abc import Callable

WINDOW_S = 0.3
"""The time of passes behind each decision: some dozens of time slices, and more than what gives way takes at a time."""
STRETCHED = 1.5
"""Where passes take so many times the processor time of their first thread, half of the threads compute. Twice would be
the limit if all computed alike, but the first computes what the others leave undone."""
FREE = 1.2
"""Below it the cores are free: with a process on every core, one thread takes half as long again."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 20.0
"""Time before twice as many threads are tried again; it doubles whenever they are held up again, so that trying costs
little where one core stays busy."""


class ThreadCount:
    """Chooses the number of threads of each pass of one model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.spent_s = (ctypes.c_double * 2)()
        """To what the kernels add each pass: its time, and the processor time of its first thread."""
        self._clock = clock
        self._num_halvings = 0
        self._pause_s, self._paused_until_s = FIRST_PAUSE_S, 0.0

    def choose(self, limit: int) -> int:
        """Return the number of threads of the next pass, at most `limit`."""
        taken_s, computed_s = self.spent_s
        if taken_s >= WINDOW_S:
            self._adapt(taken_s > STRETCHED * computed_s, taken_s < FREE * computed_s, limit)
            self.spent_s[:] = [0.0, 0.0]
        return max(1, limit >> self._num_halvings)

    def _adapt(self, is_stretched: bool, is_free: bool, limit: int) -> None:
        now_s = self._clock()
        if is_stretched and limit >> self._num_halvings > 1:
            self._num_halvings += 1
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        elif is_free and not self._num_halvings:
            self._pause_s = FIRST_PAUSE_S
        elif is_free and now_s >= self._paused_until_s:
            self._num_halvings -= 1
