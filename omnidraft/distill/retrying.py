"""Waiting for a log, a registry or room on a disk that is away for a while."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from omnidraft.errors import BusError, RegistryError, StorageError

WAITS_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Before the next try; the last one repeats."""
TICK_S = 0.05

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def retry(action: Callable[[], Result], stop: Callable[[], bool], failed: Callable[[], None] = lambda: None) -> Result:
    """What `action` returns, tried again until the log and the registry answer and the disk has room; `failed` is told
    of every time that they did not.

    Raises:
        BusError, RegistryError, StorageError: it failed, and `stop` holds.
    """
    num_failed = 0
    while True:
        try:
            return action()
        except (BusError, RegistryError, StorageError) as exc:
            failed()
            if stop():
                raise
            wait_s = WAITS_S[min(num_failed, len(WAITS_S) - 1)]
            num_failed += 1
            logger.warning("trying again in %.1f s: %s", wait_s, exc)
            wait(wait_s, stop)


def wait(seconds: float, stop: Callable[[], bool]) -> None:
    """Sleep, but not past `stop`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not stop():
        time.sleep(min(TICK_S, max(0.0, until - time.monotonic())))
