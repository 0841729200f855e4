"""Calls in threads of their own, for a service that may hang: its caller can give up waiting, or go on with other work.

The threads are daemons: a call that is never answered holds up no process that ends.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import Any, TypeVar, cast

CHECK_S = 0.2
"""Seconds between two turns at the other work while a call is not answered."""

Result = TypeVar("Result")
Service = TypeVar("Service")


def within(timeout_s: float, call: Callable[[], Result]) -> Result:
    """Return what the call returns. Raises what it raises; TimeoutError: it goes on, and its result is lost."""
    future = _start(call)
    if not wait([future], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return future.result()


def beside(meanwhile: Callable[[], None], call: Callable[[], Result]) -> Result:
    """Return what the call returns, or raise what it raises; until then the calling thread calls `meanwhile` again and
    again, which must not raise."""
    future = _start(call)
    while not wait([future], CHECK_S).done:
        meanwhile()
    return future.result()


def attentive(service: Service, meanwhile: Callable[[], None]) -> Service:
    """Return the same service, each of whose methods runs `beside` what its caller does meanwhile."""
    return cast(Service, _Attentive(service, meanwhile))


class _Attentive:
    def __init__(self, service: Any, meanwhile: Callable[[], None]) -> None:
        self._service, self._meanwhile = service, meanwhile

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._service, name)
        return lambda *args, **options: beside(self._meanwhile, partial(method, *args, **options))


def _start(call: Callable[[], Result]) -> Future[Result]:
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # for the thread that waits
            future.set_exception(exc)

    Thread(target=copy_context().run, args=(run,), name="call", daemon=True).start()
    return future
