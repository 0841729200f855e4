"""A thread's lower priority and its gate are its own."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from omnidraft.throttle import NICENESS, gated, lower_priority, rest


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have no priority of their own")
def test_a_lower_priority_is_the_threads_own() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    def lowered() -> int:
        lower_priority()
        return priority()

    before = priority()
    with ThreadPoolExecutor(1) as lowering, ThreadPoolExecutor(1) as other:
        assert lowering.submit(lowered).result() == max(before, NICENESS)
        assert other.submit(priority).result() == before
    assert priority() == before


def test_gated_work_asks_the_gate_at_every_rest_and_only_in_its_own_block() -> None:
    asked: list[int] = []
    rest()
    with gated(lambda: asked.append(1)):
        rest()
        rest()
        with ThreadPoolExecutor(1) as other:
            other.submit(rest).result()
    rest()
    assert asked == [1, 1]


OTHER = "import os; os.setsid(); os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile True: pass"
OURS = """
import os, time
from omnidraft.throttle import give_way, rest

give_way()
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
while True:
    end_s = time.thread_time() + 0.005
    while time.thread_time() < end_s:
        pass
    rest()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no process is bound to a core")
def test_what_gives_way_leaves_a_busy_core_to_others_and_takes_a_free_one() -> None:
    """The other has a session of its own: a system may give a nice process of another session as much."""

    def computed_s(process: psutil.Popen, at_least_s: float) -> float:
        """Return the processor time of a process when it has so much."""
        while (total := sum(process.cpu_times()[:2])) < at_least_s:
            assert process.poll() is None
            time.sleep(0.05)
        return total

    with psutil.Popen([sys.executable, "-c", OTHER]) as other, psutil.Popen([sys.executable, "-c", OURS]) as ours:
        try:
            before_s = computed_s(ours, at_least_s=0.1)
            computed_s(other, at_least_s=sum(other.cpu_times()[:2]) + 2)
            beside_s = computed_s(ours, at_least_s=0)
            assert beside_s - before_s < 0.3
            other.suspend()
            computed_s(ours, at_least_s=beside_s + 0.1)
        finally:
            other.kill()
            ours.kill()
