"""A thread's lower priority and its gate are its own."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

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
