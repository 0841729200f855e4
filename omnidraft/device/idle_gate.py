"""The gate between requests and learning in one process: learning goes on only while no request runs.

A request passes at once, whatever learning does. Learning asks the gate between two pieces of its work, so it runs
beside a request until its piece ends, and no longer.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Condition

IDLE_S = 1.0
"""The time without requests after which learning goes on: the short pauses between requests are left alone."""


class IdleGate:
    """Any thread may make requests; one thread learns."""

    def __init__(self, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`idle_s` is the time without requests after which learning goes on."""
        self._idle_s, self._clock = idle_s, clock
        self._condition = Condition()
        self._num_requests = 0
        self._idle_from_s = clock() + idle_s
        self._is_open = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep learning away inside the block."""
        with self._condition:
            self._num_requests += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_requests -= 1
                self._idle_from_s = self._clock() + self._idle_s
                self._condition.notify_all()

    def wait(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Return when learning may go on: no request runs, and none has for `idle_s`; at once after `open`.

        Args:
            waiting: returns the block to wait in where that is not at once. No request waits for it.
        """
        with self._condition:
            if self._may_learn():
                return
        with waiting(), self._condition:
            while not self._may_learn():
                self._condition.wait(None if self._num_requests else self._idle_from_s - self._clock())

    def open(self) -> None:
        """Let learning go on from now on, whatever runs: it is to end what it has begun."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def _may_learn(self) -> bool:
        return self._is_open or (not self._num_requests and self._clock() >= self._idle_from_s)
