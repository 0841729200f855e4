"""The distiller process with real Ray, SQLite log and folders: killed in the middle, it loses and repeats nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from omnidraft import config, wiring
from omnidraft.models.hf.tokenizer import load_tokenizer
from omnidraft.ports import Outgoing, Registry
from omnidraft.snapshots.manifest import Manifest
from omnidraft.traces import codec
from omnidraft.vocab.alignment import align
from tests.unit.distill.conftest import Pair, save_model, save_tokenizer

TEXTS = ("The river goes into the sea. ", "Where does the water go?", "def add(first, second): return first")
START_S = 240.0
ROOT = Path(__file__).parents[2]
ACTOR = "ray::Distill"
"""How Ray names the actor's process."""


class Fleet:
    """One log, one registry and the distiller process in front of them."""

    def __init__(self, folder: Path) -> None:
        save_model(folder / "drafter", len(save_tokenizer(folder / "drafter", 300, TEXTS[1:]).vocabulary), tied=True)
        save_model(folder / "target", len(save_tokenizer(folder / "target", 340, TEXTS[:2]).vocabulary), tied=True)
        self.environ = {
            "OMNIDRAFT_LOG": f"sqlite:///{folder}/log.db",
            "OMNIDRAFT_REGISTRY__URL": f"directory:///{folder}/registry",
            "OMNIDRAFT_MODELS__DRAFTER": str(folder / "drafter"),
            "OMNIDRAFT_MODELS__TARGET": str(folder / "target"),
            "OMNIDRAFT_LEARNER__RECORDS_PER_STEP": "2",
            "OMNIDRAFT_LEARNER__STEPS_PER_SNAPSHOT": "3",
            "OMNIDRAFT_LEARNER__HELD_OUT_EVERY": "0",
            "OMNIDRAFT_METRICS__DISTILLER_PORT": "0",
            "RAY_raylet_start_wait_time_s": "120",  # a loaded machine starts Ray slowly
        }
        self.settings = config.load(environ=self.environ)
        self._log = folder / "distiller.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def registry(self) -> Registry:
        return wiring.registry(self.settings)

    def start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.distiller"],
                cwd=ROOT,
                env={**os.environ, **self.environ},
                stdout=log,
                stderr=log,
            )
        return self.process

    def emit(self, num: int, first: int = 0, target: str | None = None, **changes: Any) -> None:
        writer = wiring.log_writer(self.settings, self.settings.log.traces_topic)
        models = self.settings.models
        folders = Path(models.drafter), Path(target or models.target)
        draft, spoken = map(load_tokenizer, folders)
        pair = Pair(folders[0], draft, spoken, align(draft, spoken))
        common = {
            "drafter": models.drafter,
            "target": str(folders[1]),
            "drafter_prompt_ids": np.array([70, 80], np.uint32),
            **changes,
        }
        for n in range(first, first + num):
            record = pair.record(f"request-{n}", TEXTS[n % 3], **common)
            writer.append([Outgoing(codec.key(record), codec.encode(record), codec.headers(record))])
        writer.close()

    def newest(self) -> Manifest | None:
        versions = self.registry.versions()
        return versions[-1].manifest if versions else None

    def actor(self, process: subprocess.Popen[bytes]) -> psutil.Process | None:
        """The process in which the actor lives now."""
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if ACTOR in " ".join(child.cmdline()):
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    def wait_for(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not reached():
            assert time.monotonic() < until, self._log.read_text()
            assert self.process is not None
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.2)

    def scraped(self) -> str:
        """The metrics of all learners, at the port that the log names."""
        found = re.search(r"metrics at (\S+)", self._log.read_text())
        assert found is not None
        return httpx.get(found[1]).raise_for_status().text

    def has_learned(self, num: int) -> bool:
        newest = self.newest()
        return newest is not None and newest.num_records >= num


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    pytest.importorskip("ray")
    running = Fleet(tmp_path)
    yield running
    if running.process is not None and running.process.poll() is None:
        running.process.kill()
        running.process.wait()


@pytest.mark.timeout(600)
def test_an_actor_killed_in_the_middle_learns_every_record_once(fleet: Fleet) -> None:
    fleet.emit(12)
    process = fleet.start()
    fleet.wait_for(lambda: fleet.has_learned(6))
    first = fleet.actor(process)
    assert first is not None
    assert max(priorities(first)) >= fleet.settings.learner.nice
    first.send_signal(signal.SIGKILL)
    fleet.emit(8, first=12)
    fleet.wait_for(lambda: fleet.has_learned(18))
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_S) == 0
    newest = fleet.newest()
    assert newest is not None
    assert (newest.num_records, newest.num_steps, newest.offsets) == (20, 10, {0: 20})
    assert "duplicate" not in newest.counts


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
        return [each.manifest for each in wiring.registry(pair).versions() if each.manifest.num_records == 6]

    fleet.wait_for(lambda: all(map(learned, pairs)))
    steps = [f'omnidraft_training_steps_total{{target="{pair.models.target}"}} 3.0' for pair in pairs]
    fleet.wait_for(lambda: all(each in fleet.scraped() for each in steps))
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_S) == 0
    newest = [learned(pair)[-1] for pair in pairs]
    assert [each.target for each in newest] == [pair.models.target for pair in pairs]
    assert [each.train for each in newest] == ["lora", "lora"]


@pytest.mark.timeout(600)
def test_what_is_wrong_with_the_settings_ends_the_process_with_one_line(fleet: Fleet, tmp_path: Path) -> None:
    fleet.environ["OMNIDRAFT_LEARNER__LOSS"] = "dm + magic"
    assert fleet.start().wait(START_S) == 2
    assert "no loss 'magic'" in (tmp_path / "distiller.log").read_text().splitlines()[-1]


def priorities(process: psutil.Process) -> set[int]:
    """Of all threads: on Linux a priority belongs to a thread."""
    return {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()}
