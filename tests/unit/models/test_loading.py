"""Loading in another thread leaves no thread behind and does not change how the caller computes."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from omnidraft import throttle
from omnidraft.models.loading import in_background_thread, in_own_thread

PROCESS = """
import os, time, torch
from concurrent.futures import ThreadPoolExecutor
from omnidraft.models.loading import in_background_thread, in_own_thread

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    torch.randn(800, 800) @ torch.randn(800, 800)
    return threads()

def load():
    return torch.get_num_threads(), decoding.submit(torch.get_num_threads).result()

before, during = threads(), in_own_thread(compute)
deadline = time.monotonic() + 10
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
print(before, during, threads())
with ThreadPoolExecutor(1) as decoding:
    during = in_background_thread(load)
    print(*during, decoding.submit(torch.get_num_threads).result(), torch.get_num_threads())
"""


def test_the_thread_is_gone_when_the_load_is_done():
    threads = threading.active_count()
    name = in_own_thread(lambda: threading.current_thread().name)
    assert name.startswith("loading")
    assert threading.active_count() <= threads


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere threads are not counted so")
def test_its_openmp_threads_are_gone_too_and_a_thread_that_first_computes_meanwhile_computes_as_usual():
    """The second as the decoding thread does whose first request comes while the champion is loaded."""
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", PROCESS], env=env, capture_output=True, text=True, check=True)
    counted, meanwhile = run.stdout.splitlines()
    before, during, after = map(int, counted.split())
    assert during >= before + 2, "the load had no OpenMP thread, so this shows nothing"
    assert after == before
    assert meanwhile.split() == ["1", "2", "2", "2"]


def test_what_it_raises_is_raised():
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        in_own_thread(fail)


def test_beside_decoding_it_computes_with_one_thread_and_rests() -> None:
    usual = torch.get_num_threads()

    def load() -> tuple[int, float]:
        started_s, computed_s = time.perf_counter(), time.thread_time()
        while time.thread_time() < computed_s + 0.05:
            sum(range(1000))
            throttle.rest()
        return torch.get_num_threads(), time.perf_counter() - started_s

    assert in_own_thread(load)[0] == usual
    threads, took_s = in_background_thread(load)
    assert threads == 1
    assert took_s > 0.15
    assert in_own_thread(load)[0] == torch.get_num_threads() == usual
