"""Processes that a test run must not leave behind, however it and its test processes ended."""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

RUN_VARIABLE = "OMNIDRAFT_TEST_RUN"
"""Every process that is started below a test run inherits its name."""
_PATIENCE_S = 10.0
_watchers: list["subprocess.Popen[bytes]"] = []
"""Their standard input ends with this process."""


def name_run(config: pytest.Config) -> None:
    """Called before anything is started. A process that watches ends the others when this one is killed."""
    if not _is_test_process(config):
        os.environ[RUN_VARIABLE] = uuid.uuid4().hex
        watching = [sys.executable, __file__]
        _watchers.append(subprocess.Popen(watching, stdin=subprocess.PIPE, start_new_session=True))


def end_orphans(config: pytest.Config) -> None:
    """Called when all tests have ended."""
    if not _is_test_process(config):
        _end_others()


def _end_others() -> None:
    """End every other process of this run: politely, then by force."""
    left = list(_of_this_run())
    for process in left:
        _signal(process.terminate)
    for process in psutil.wait_procs(left, _PATIENCE_S)[1]:
        _signal(process.kill)


def _is_test_process(config: pytest.Config) -> bool:
    """Whether this is one of pytest-xdist's processes, and not the one that started them."""
    return hasattr(config, "workerinput")


def _of_this_run() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            named = process.environ().get(RUN_VARIABLE)
        except psutil.Error:
            continue
        if named == os.environ[RUN_VARIABLE] and process.pid != os.getpid():
            yield process


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    sys.stdin.read()  # until the one who started this is gone
    _end_others()
