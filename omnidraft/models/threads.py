"""Load models in a thread that ends with the load, so that its OpenMP threads end too.

torch's libgomp waits for its threads by spinning, which makes small kernels cheap; but as soon as the OpenMP threads of
all pools outnumber the processors, it sleeps at every wait, and a drafter step takes twice as long. Each thread that
ever computed in parallel has a pool until it ends. However many targets a worker serves, one thread decodes for all of
them (serving/request_queue.py), so a single pool remains once everything is loaded.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from omnidraft import throttle

Loaded = TypeVar("Loaded")


def in_own_thread(load: Callable[[], Loaded]) -> Loaded:
    """Run `load` in a thread of its own; return what it returns, raise what it raises."""
    with ThreadPoolExecutor(1, thread_name_prefix="loading") as thread:
        return thread.submit(load).result()


def in_background_thread(load: Callable[..., Loaded], *args: Any) -> Loaded:
    """Run `load(*args)` beside decoding: with one OpenMP thread, and throttled between its pieces."""

    def run() -> Loaded:
        with _single_openmp_thread(), throttle.throttled():
            return load(*args)

    return in_own_thread(run)


@contextmanager
def _single_openmp_thread() -> Iterator[None]:
    """Limit torch and OpenMP to one thread, in this thread alone. torch's own setting would apply for good to every
    thread that first computes meanwhile."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.get_num_threads()  # its first call sets the number of this thread
    with threadpool_limits(1, user_api="openmp"):
        yield


def lower_priority(nice: int) -> None:
    """Lower the priority of the calling thread and of those it starts (on Linux priority belongs to a thread)."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
