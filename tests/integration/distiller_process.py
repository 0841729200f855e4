"""The distiller as a process of its own, with one log and one registry, for tests that kill it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from omnidraft import assembly, config
from omnidraft.models.hf.tokenizer import load_tokenizer
from omnidraft.ports import Outgoing, Registry
from omnidraft.snapshots.manifest import Manifest
from omnidraft.traces import codec
from omnidraft.vocab.alignment import align
from tests.tiny_pair import Pair, save_model, save_tokenizer

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
            "OMNIDRAFT_LEARNER__HOST": "ray",
            "OMNIDRAFT_METRICS__DISTILLER_PORT": "0",
            "RAY_raylet_start_wait_time_s": "120",  # a loaded machine starts Ray slowly
        }
        self.settings = config.load(environ=self.environ)
        self._log = folder / "distiller.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def registry(self) -> Registry:
        return assembly.registry(self.settings)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the service, or Python with other arguments."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(arguments or ("-m", "services.distiller"))],
                cwd=ROOT,
                env={**os.environ, **self.environ},
                stdout=log,
                stderr=log,
            )
        return self.process

    def emit(self, num: int, first: int = 0, target: str | None = None, **changes: Any) -> None:
        writer = assembly.log_writer(self.settings, self.settings.log.traces_topic)
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


def run_learner(fleet: Fleet, folder: Path, offset: int) -> int:
    """Until it dies, or has learned to this offset; its exit code."""
    return subprocess.run(
        [sys.executable, "-m", "tests.integration.lethal_learner", str(folder), str(offset)],
        cwd=ROOT,
        env={**os.environ, **fleet.environ},
        timeout=200,
        check=False,
    ).returncode
