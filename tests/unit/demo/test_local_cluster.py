"""Services end with the process that started them, however it ends."""

import signal
import subprocess
import sys

import psutil
import pytest
from tenacity import Retrying, stop_after_delay, wait_fixed

PARENT = """
import sys, time
from pathlib import Path
from omnidraft.demo.local_cluster import LocalCluster

with LocalCluster(Path(sys.argv[1])) as cluster:
    print(cluster.start("service", ["sleep", "600"]), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_service_outlives_a_killed_parent(tmp_path, number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        service = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        parent.wait(30)
    for attempt in Retrying(stop=stop_after_delay(30), wait=wait_fixed(0.1), reraise=True):
        with attempt:
            assert has_ended(service)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
