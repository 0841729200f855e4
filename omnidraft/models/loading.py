"""Load models in a thread that ends with the load, so that its OpenMP threads end too.

torch's libgomp waits for its threads by spinning, which makes a small kernel cheap; but as soon as the OpenMP threads
of all pools outnumber the processors, it puts every wait to sleep, and a drafter step takes twice as long. Each thread
that ever computed in parallel has a pool until it ends. However many targets a worker serves, one thread decodes for
all of them (serving/queue.py), so one pool is all there is once everything is loaded.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from omnidraft import pacing

Loaded = TypeVar("Loaded")


def apart(load: Callable[[], Loaded]) -> Loaded:
    """What `load` returns or raises."""
    with ThreadPoolExecutor(1, thread_name_prefix="loading") as thread:
        return thread.submit(load).result()


def beside_decoding(load: Callable[[], Loaded]) -> Loaded:
    """What `load` returns or raises; it computes with one thread, and rests between its pieces."""

    def run() -> Loaded:
        with _one_thread(), pacing.paced():
            return load()

    return apart(run)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Of torch and OpenMP, in this thread; also in threads that begin to compute meanwhile."""
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def lower_priority(nice: int) -> None:
    """Of the calling thread and of those it starts: on Linux priority belongs to a thread. Never raises it."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
