"""Load models in a thread that ends with the load, so that its OpenMP threads end too.

torch's libgomp waits for its threads by spinning, which makes a small kernel cheap; but as soon as the OpenMP threads
of all pools outnumber the processors, it puts every wait to sleep, and a drafter step takes twice as long. Each thread
that ever computed in parallel has a pool until it ends. However many targets a worker serves, one thread decodes for
all of them (serving/request_queue.py), so one pool is all there is once everything is loaded.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from omnidraft import throttle

Loaded = TypeVar("Loaded")


def in_own_thread(load: Callable[[], Loaded]) -> Loaded:
    """What `load` returns or raises."""
    with ThreadPoolExecutor(1, thread_name_prefix="loading") as thread:
        return thread.submit(load).result()


def beside_decoding(load: Callable[..., Loaded], *args: Any) -> Loaded:
    """What `load(*args)` returns or raises; it computes with one thread, and rests between its pieces."""

    def run() -> Loaded:
        with _one_thread(), throttle.throttled():
            return load(*args)

    return in_own_thread(run)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Of torch and OpenMP, in this thread alone: what torch itself sets would hold for every thread that computes its
    first numbers meanwhile, for good."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.get_num_threads()  # which sets this thread's number when first asked
    with threadpool_limits(1, user_api="openmp"):
        yield


def lower_priority(nice: int) -> None:
    """Of the calling thread and of those it starts: on Linux priority belongs to a thread. Never raises it."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
