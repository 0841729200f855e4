"""A process that keeps freed memory does not ask the system for the same pages again."""

import ctypes
import subprocess
import sys

import pytest

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
