"""Retries while a log, a registry or space on a disk is away, cut short when the process is to stop."""

import logging
import time
from collections.abc import Callable
from itertools import chain, repeat
from math import ceil
from typing import TypeVar

from omnidraft.errors import BusError, ConfigError, RegistryError, StorageError

WAITS_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before the next attempt; the last one repeats."""
TICK_S = 0.05
PIECE_S = 2.0
"""Seconds of a wait between two turns at other work."""

Result = TypeVar("Result")
Stop = Callable[[], bool]
Wait = Callable[[float, Stop], None]
"""Sleeps for so many seconds, or until the process is to stop."""

logger = logging.getLogger(__name__)


def wait(seconds: float, stop: Stop) -> None:
    """Sleep, but not past `stop`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not stop():
        time.sleep(min(TICK_S, max(0.0, until - time.monotonic())))


def retry(
    action: Callable[[], Result],
    stop: Stop,
    on_failure: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    wait: Wait = wait,
) -> Result:
    """Return what `action` returns, tried again until it succeeds; `on_failure` is called after every failure, and
    `meanwhile` again and again during the waits.

    Raises:
        BusError, RegistryError, StorageError: it failed, and `stop` holds.
        StoreLibraryMissing: it failed for want of a library.
    """
    waits_s = chain(WAITS_S, repeat(WAITS_S[-1]))
    while True:
        try:
            return action()
        except ConfigError:  # which may be a RegistryError too, and does not pass
            raise
        except (BusError, RegistryError, StorageError) as exc:
            on_failure()
            if stop():
                raise
            seconds = next(waits_s)
            logger.warning("trying again in %.1f s: %s", seconds, exc)
        for piece in range(ceil(seconds / PIECE_S)):
            wait(min(seconds - piece * PIECE_S, PIECE_S), stop)
            meanwhile()
