"""A thread's lower priority and its gate are its own."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from omnidraft import throttle
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


def test_rounds_of_any_process_of_the_home_count_as_decoding_for_a_while_but_not_those_of_who_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "new"))
    throttle._newest_round.cache_clear()
    try:
        with gated(lambda: None):
            throttle.note_round()
        assert not throttle.decodes()
        subprocess.run([sys.executable, "-c", "from omnidraft.throttle import note_round; note_round()"], check=True)
        assert throttle.decodes()
        time.sleep(0.6)
        assert not throttle.decodes()
    finally:
        throttle._newest_round.cache_clear()


ROOT = Path(__file__).parents[2]
OTHER = """
import os, sys, time
from omnidraft.throttle import note_round

os.setsid()
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
while True:
    if sys.argv[1] == "decodes":
        note_round()
"""
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
@pytest.mark.parametrize(("other", "least", "most"), [("decodes", 0.0, 0.03), ("computes", 0.03, 0.5)])
def test_what_gives_way_leaves_a_busy_core_to_decoding_and_a_share_to_others_and_takes_a_free_one(
    tmp_path: Path, other: str, least: float, most: float
) -> None:
    """The other has a session of its own: a system may give a nice process of another session as much."""

    def computed_s(process: psutil.Popen, at_least_s: float) -> float:
        """Return the processor time of a process when it has so much."""
        while (total := sum(process.cpu_times()[:2])) < at_least_s:
            assert process.poll() is None
            time.sleep(0.05)
        return total

    started = partial(psutil.Popen, env=os.environ | {"PYTHONPATH": str(ROOT), "OMNIDRAFT_HOME": str(tmp_path)})
    with started([sys.executable, "-c", OTHER, other]) as busy, started([sys.executable, "-c", OURS]) as ours:
        try:
            ours_s, busy_s = computed_s(ours, at_least_s=0.1), computed_s(busy, at_least_s=1)
            took_s = computed_s(busy, at_least_s=busy_s + 3) - busy_s
            share = (computed_s(ours, at_least_s=0) - ours_s) / took_s
            assert least <= share < most
            busy.suspend()
            computed_s(ours, at_least_s=computed_s(ours, 0) + 0.1)
        finally:
            busy.kill()
            ours.kill()
