"""Retries while a log, a registry or space on a disk is away, cut short when the process is to stop."""

import logging
import time
from collections.abc import Callable
from math import ceil
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_chain, wait_fixed

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

    def sleep(seconds: float) -> None:
        for piece in range(ceil(seconds / PIECE_S)):
            wait(min(seconds - piece * PIECE_S, PIECE_S), stop)
            meanwhile()

    retrying = Retrying(
        retry=retry_if_exception(_may_pass),
        wait=wait_chain(*map(wait_fixed, WAITS_S)),
        stop=lambda state: stop(),
        sleep=sleep,
        after=lambda state: on_failure(),
        before_sleep=_log_failure,
        reraise=True,
    )
    return retrying(action)


def _may_pass(exc: BaseException) -> bool:
    return isinstance(exc, BusError | RegistryError | StorageError) and not isinstance(exc, ConfigError)


def _log_failure(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    logger.warning("trying again in %.1f s: %s", state.upcoming_sleep, error)
