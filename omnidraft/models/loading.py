"""Load models in a thread that ends with the load, so that its OpenMP threads end too.

torch's libgomp waits for its threads by spinning, which makes a small kernel cheap; but as soon as the OpenMP threads
of all pools outnumber the processors, it puts every wait to sleep, and a drafter step takes twice as long. Each thread
that ever computed in parallel has a pool until it ends. However many targets a worker serves, one thread decodes for
all of them (serving/queue.py), so one pool is all there is once everything is loaded.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Loaded = TypeVar("Loaded")


def apart(load: Callable[[], Loaded], *, nice: int = 0) -> Loaded:
    """What `load` returns or raises.

    Args:
        nice: lowers the priority of that thread and of those it starts (Linux), for loads beside decoding.
    """

    def run() -> Loaded:
        lower_priority(nice)
        return load()

    with ThreadPoolExecutor(1, thread_name_prefix="loading") as thread:
        return thread.submit(run).result()


def lower_priority(nice: int) -> None:
    """Of the calling thread and of those it starts: on Linux priority belongs to a thread. Never raises it."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
