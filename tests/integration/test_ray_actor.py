"""The distiller process with real Ray, SQLite log and folders: killed in the middle, it loses and repeats nothing."""

import ipaddress
import itertools
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from omnidraft import assembly, config
from omnidraft.demo.local_cluster import free_port
from omnidraft.snapshots.manifest import Manifest
from omnidraft.throttle import NICENESS
from tests.integration.distiller_process import START_S, TEXTS, Fleet
from tests.tiny_pair import save_model, save_tokenizer


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    pytest.importorskip("ray")
    running = Fleet(tmp_path)
    yield running
    if running.process is not None and running.process.poll() is None:
        running.process.kill()
        running.process.wait()


@pytest.mark.timeout(600)
def test_an_actor_killed_in_the_middle_learns_every_record_once_and_leaves_nothing_behind(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Meanwhile nobody else reaches Ray: neither from another machine nor through its files."""
    (temporary := tmp_path / "temporary").mkdir()
    fleet.environ |= {"TMPDIR": str(temporary), "HOME": str(tmp_path)}
    fleet.emit(12)
    process = fleet.start()
    fleet.wait_for(lambda: fleet.has_learned(6))
    ray = ray_folder(process)
    assert (stat.S_IMODE(ray.stat().st_mode), (tmp_path / ".ray").exists()) == (0o700, False)
    assert {address for address in listening(process) if not address.is_loopback} == set()
    first = fleet.actor(process)
    assert first is not None
    assert max(priorities(first)) == NICENESS
    staged = set(temporary.glob("omnidraft-*/staging"))
    first.send_signal(signal.SIGKILL)
    fleet.emit(8, first=12)
    fleet.wait_for(lambda: fleet.has_learned(18))
    assert staged
    assert not [folder for folder in staged if folder.exists()]
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_S) == 0
    newest = fleet.newest()
    assert newest is not None
    assert (newest.num_records, newest.num_steps, newest.offsets) == (20, 10, {0: 20})
    assert "duplicate" not in newest.counts
    assert list(temporary.glob("omnidraft-*")) == []
    assert not ray.exists()


def ray_folder(process: subprocess.Popen[bytes]) -> Path:
    """The distiller's folder for Ray's sessions."""
    commands = [each.cmdline() for each in psutil.Process(process.pid).children(recursive=True)]
    found = re.search(r"(/[^ =]*)/ray/session_", " ".join(itertools.chain(*commands)))
    assert found is not None
    return Path(found[1])


def listening(process: subprocess.Popen[bytes]) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses at which a process and its children listen."""
    parent = psutil.Process(process.pid)
    connections = [each for one in (parent, *parent.children(recursive=True)) for each in one.net_connections("tcp")]
    names = {each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN}
    return set(map(ipaddress.ip_address, names))


@pytest.mark.timeout(600)
def test_a_ray_that_hangs_at_its_start_ends_the_process_with_one_line_and_leaves_nothing(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.environ["RAY_raylet_start_wait_time_s"] = "10"
    process = fleet.start()
    children = set[psutil.Process]()
    while process.poll() is None:
        time.sleep(0.02)
        with suppress(psutil.NoSuchProcess):
            children |= set(psutil.Process(process.pid).children(recursive=True))
            for each in children:
                if each.name() == "raylet":
                    each.suspend()
    assert process.returncode == 2
    *_, refusal = (tmp_path / "distiller.log").read_text().splitlines()
    advice = r'start again, or learn without it \(`learner\.host = "process"`\)'
    assert re.match(rf"omnidraft distiller: Ray did not start within \d+ s: {advice}\.", refusal)
    assert [each for each in children if each.is_running()] == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_targets_learn_side_by_side_each_its_own_adapter(fleet: Fleet, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_model(other, len(save_tokenizer(other, 320, TEXTS[1:]).vocabulary), tied=True)
    fleet.environ |= {"OMNIDRAFT_MODELS__MORE_TARGETS": f'["{other}"]', "OMNIDRAFT_LEARNER__TRAIN": "lora"}
    fleet.emit(6)
    fleet.emit(6, target=str(other))
    process = fleet.start()
    pairs = [fleet.settings.for_target(target) for target in (fleet.settings.models.target, str(other))]

    def learned(pair: config.Settings) -> list[Manifest]:
        return [each.manifest for each in assembly.registry(pair).versions() if each.manifest.num_records == 6]

    fleet.wait_for(lambda: all(map(learned, pairs)))
    steps = [f'omnidraft_training_steps_total{{target="{pair.models.target}"}} 3.0' for pair in pairs]
    fleet.wait_for(lambda: all(each in fleet.scraped() for each in steps))
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_S) == 0
    newest = [learned(pair)[-1] for pair in pairs]
    assert [each.target for each in newest] == [pair.models.target for pair in pairs]
    assert [each.train for each in newest] == ["lora", "lora"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cluster_that_cannot_be_joined_ends_the_process_with_one_line(fleet: Fleet, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    fleet.environ |= {"RAY_ADDRESS": address, "RAY_NUM_REDIS_GET_RETRIES": "1", "HOME": str(tmp_path)}
    assert fleet.start().wait(START_S) == 2
    refusal = (tmp_path / "distiller.log").read_text().splitlines()[-1]
    assert refusal.startswith(f"omnidraft distiller: RAY_ADDRESS={address} names no Ray cluster that can be joined: ")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_a_learner_warns_of_is_in_the_distillers_log(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fleet.environ["OMNIDRAFT_LEARNER__JOURNAL_FOLDER"] = str(tmp_path / "file" / "journal")
    fleet.emit(4)
    process = fleet.start()
    warning = f"{fleet.settings.models.target}: the crash journal cannot be written"
    fleet.wait_for(lambda: warning in (tmp_path / "distiller.log").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_S) == 0


def priorities(process: psutil.Process) -> set[int]:
    """Of all threads: on Linux a priority belongs to a thread."""
    return {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()}
