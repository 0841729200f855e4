"""Processes that a test run must not leave behind, however its test processes ended."""

import os
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

_VARIABLE = "OMNIDRAFT_TEST_RUN"
"""Every process that is started below a test run inherits its name."""
_PATIENCE_S = 10.0


def name_run(config: pytest.Config) -> None:
    """Called before anything is started."""
    if not _is_test_process(config):
        os.environ[_VARIABLE] = uuid.uuid4().hex


def end_orphans(config: pytest.Config) -> None:
    """End every other process of this run: politely, then by force."""
    if _is_test_process(config):
        return
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
            named = process.environ().get(_VARIABLE)
        except psutil.Error:
            continue
        if named == os.environ[_VARIABLE] and process.pid != os.getpid():
            yield process


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return
