"""How models are loaded: once for all who share them, and in a thread that ends with the load.

The OpenMP threads of a thread end with it. torch's libgomp waits for its threads by spinning, which makes small kernels
cheap; but as soon as the OpenMP threads of all pools outnumber the processors, it sleeps at every wait, and a drafter
step takes twice as long. Each thread that ever computed in parallel has a pool until it ends. However many targets a
worker serves, one thread decodes for all of them (serving/request_queue.py), so a single pool remains once everything
is loaded.
"""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from threading import Lock
from typing import Any, TypeVar

from omnidraft import throttle
from omnidraft.ports import DraftModel

Loaded = TypeVar("Loaded")


def in_own_thread(load: Callable[[], Loaded]) -> Loaded:
    """Run `load` in a thread of its own, gated as the caller is (throttle.py); return what it returns, raise what it
    raises."""
    with ThreadPoolExecutor(1, thread_name_prefix="loading") as thread:
        return thread.submit(copy_context().run, load).result()


def in_background_thread(load: Callable[..., Loaded], *args: Any) -> Loaded:
    """Run `load(*args)` beside decoding: with one OpenMP thread, and throttled between its pieces."""

    def run() -> Loaded:
        with openmp_threads(1), throttle.throttled():
            return load(*args)

    return in_own_thread(run)


@contextmanager
def openmp_threads(number: int) -> Iterator[None]:
    """Limit torch and OpenMP to so many threads, in this thread alone. torch's own setting would apply for good to
    every thread that first computes meanwhile."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.get_num_threads()  # its first call sets the number of this thread
    with threadpool_limits(number, user_api="openmp"):
        yield


class SharedDrafter:
    """Loads the base drafter at the first call and shares it through a weak reference, as long as somebody uses it.

    A DraftModel has no state but its weights, so any number of snapshots may use it. Its memory is freed once every
    target serves learned weights.
    """

    def __init__(self, load: Callable[[], DraftModel]) -> None:
        self._load = load
        self._loaded: weakref.ref[DraftModel] | None = None
        self._lock = Lock()

    def get(self) -> DraftModel:
        """Return the model. Any thread may call; while one loads, the others wait for the same model."""
        with self._lock:
            model = self._loaded() if self._loaded is not None else None
            if model is None:
                model = self._load()
                self._loaded = weakref.ref(model)
            return model
