"""On busy cores the threads of a pass sleep while they wait for each other, and fewer of them compute."""

import os
import subprocess
import sys

import pytest

from omnidraft.models.native.thread_count import FIRST_PAUSE_S, LAST_PAUSE_S, WINDOW_S, ThreadCount

TWO_THREADS_ON_ONE_CORE = """
import os, time, torch
from omnidraft.models.kv_session import PassSegment
from omnidraft.models.native import library
from omnidraft.models.native.model import NativeModel
from transformers import Qwen2Config, Qwen2ForCausalLM

shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
model = Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=2, num_hidden_layers=30))
native = NativeModel(model.eval(), "int8", library.load())
backend = native.open()
torch.set_num_threads(2)
native.forward([PassSegment(backend, 0, None, [1], 1)])  # which starts the second thread
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), [min(os.sched_getaffinity(0))])
started_s = time.process_time()
native.forward([PassSegment(backend, 1, None, [2], 1)])
print(time.process_time() - started_s)
"""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no thread is bound to a core")
def test_a_thread_that_waits_for_its_processor_is_not_waited_for_by_spinning() -> None:
    """A pass over 30 layers has 210 barriers; spinning for a time slice of 3 ms at each takes 0.6 s."""
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    run = [sys.executable, "-c", TWO_THREADS_ON_ONE_CORE]
    computed_s = float(subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout)
    assert computed_s < 0.1


class Machine:
    """Passes on a virtual clock, whose stretch depends on the number of threads."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.count = ThreadCount(lambda: self.now_s)

    def run(self, duration_s: float, *stretches: float, limit: int = 4) -> list[int]:
        """Compute for so long; return the numbers of threads, without repetitions.

        Args:
            stretches: of passes of 1, 2, 3, ... threads.
        """
        numbers: list[int] = []
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            threads = self.count.choose(limit)
            if numbers[-1:] != [threads]:
                numbers.append(threads)
            self.now_s += WINDOW_S / 8
            self.count.spent_s[0] += WINDOW_S / 8
            self.count.spent_s[1] += WINDOW_S / 8 / stretches[threads - 1]
        return numbers


def test_all_threads_compute_on_free_cores() -> None:
    assert Machine().run(100, 1, 1.1, 1.1, 1.3) == [4]


def test_stretched_passes_take_fewer_threads_until_the_cores_are_free() -> None:
    machine = Machine()
    assert machine.run(1, 1.5, 4, 6, 8) == [4, 2, 1]
    assert machine.run(100, 1.5, 4, 6, 8) == [1], "one thread is stretched too, so every core is busy"
    assert machine.run(1, 1, 1, 1, 1) == [1, 2, 4]


def test_one_slow_pass_changes_nothing() -> None:
    machine = Machine()
    machine.run(1, 1, 1, 1, 1)
    machine.run(WINDOW_S / 8, 2, 2, 2, 2)
    assert machine.run(1, 1, 1, 1, 1) == [4]


def test_where_one_core_stays_busy_all_threads_are_tried_less_and_less_often() -> None:
    machine = Machine()
    tries = [machine.run(60, 1, 3, limit=2).count(2) for _ in range(10)]
    assert tries[0] <= 1 + 60 / FIRST_PAUSE_S
    assert tries[-1] <= 2 * 60 / LAST_PAUSE_S
    assert 2 in machine.run(2 * LAST_PAUSE_S, 1, 1, limit=2)
    assert machine.run(1, 1, 3, limit=2) == [2, 1]
    assert 2 in machine.run(2 * FIRST_PAUSE_S, 1, 1, limit=2), "a core that was free for long is tried soon again"


def test_one_thread_stays_one() -> None:
    assert Machine().run(10, 9, limit=1) == [1]
