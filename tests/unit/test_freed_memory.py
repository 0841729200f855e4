"""The memory of a process: what it frees comes again, and what it keeps goes into huge pages."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest


def _can_collapse() -> bool:
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    is_offered = huge_pages.exists() and "[never]" not in huge_pages.read_text()
    return is_offered and tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)


PROGRAM = """
import resource
from omnidraft.system import keep_freed_memory

if {keeps}:
    keep_freed_memory()
for _ in range(3):
    bytearray(b"x") * 2**26
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    bytearray(b"x") * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
NUM_PAGES = 2**26 // 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another malloc than glibc's")
def test_arrays_that_come_again_get_the_pages_of_those_before() -> None:
    faults = {
        keeps: int(subprocess.run([sys.executable, "-c", PROGRAM.format(keeps=keeps)], stdout=-1, check=True).stdout)
        for keeps in (False, True)
    }
    assert faults[True] < NUM_PAGES < faults[False]


OBJECTS = """
from pathlib import Path
from omnidraft.system import collect_in_huge_pages

def huge():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

kept = [str(number) for number in range(2_000_000)]
before = huge()
collect_in_huge_pages()
assert kept == [str(number) for number in range(2_000_000)]
print(huge() - before)
"""


@pytest.mark.skipif(not _can_collapse(), reason="Linux before 6.1, or without huge pages")
def test_objects_are_collected_in_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", OBJECTS], stdout=-1, check=True)
    assert int(done.stdout) * 1024 > 2_000_000 * sys.getsizeof("1999999") / 2
