"""The distiller inside a Ray actor: receives settings, builds everything in its own process, restarts when killed.

Ray restarts a killed actor and calls `run` again; the newest snapshot holds the offsets to resume at, so beside the
crash journal and the truncation mark the actor has no other state. Snapshots, which hold users' texts, are staged in a
folder that no process leaves behind: `run` removes it, and where the process is killed, the next one on its node does.
`run` uses one thread of the actor, `status` and `stop` another. This module does not import Ray: distiller.py makes the
actor.
"""

import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from omnidraft.config import LearnerSettings, Settings
from omnidraft.distill.control import Status, TrainingControl
from omnidraft.distill.distiller import Distiller
from omnidraft.hosts.process import configure_logging
from omnidraft.registry.staging import own_folder
from omnidraft.system import available_memory
from omnidraft.telemetry.metric_definitions import DISTILLER
from omnidraft.telemetry.metrics import PrometheusMetrics
from omnidraft.throttle import Courtesy, gated, lower_priority

MAX_WARNINGS = 100
_PAUSE_S = 0.1
"""Learning pauses so long between two pieces while texts are decoded here: beside a worker that is never idle it has a
tenth of a processor."""


class WarningBuffer(logging.Handler):
    """The newest MAX_WARNINGS warnings and errors of this process that were not taken yet."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warnings: deque[tuple[int, str]] = deque(maxlen=MAX_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._warnings.append((record.levelno, self.format(record)))
        except Exception:  # a message that does not fit its arguments, of any library; logging never raises
            self.handleError(record)

    def take(self) -> list[tuple[int, str]]:
        """Return level and text of each, oldest first, and forget them."""
        self.acquire()
        try:
            taken = list(self._warnings)
            self._warnings.clear()
        finally:
            self.release()
        return taken


class DistillerActor:
    """One learner of one vocabulary pair."""

    def __init__(self, settings: Settings, journal_folder: str) -> None:
        """
        Args:
            journal_folder: where the crash journal and the truncation mark are, unless `learner.journal_folder` is set.
                It outlives the actor's process; actors may share it.
        """
        self._settings = settings
        self._journal_folder = Path(journal_folder)
        self.stopping = threading.Event()
        """Set by `stop`."""
        self._distiller: Distiller | None = None
        self._metrics = PrometheusMetrics(DISTILLER, settings.models.targets)
        self._warnings = WarningBuffer()

    def run(self) -> None:
        """Learn until `stop`. Raises the OmnidraftError of settings, log or registry unchanged."""
        configure_logging(f"distiller for {self._settings.models.target}")  # it adds no handler beside others
        logging.getLogger().addHandler(self._warnings)
        try:
            self._learn()
        finally:
            logging.getLogger().removeHandler(self._warnings)

    def _learn(self) -> None:
        from omnidraft import assembly

        _limit_resources(self._settings.learner)
        tracing = assembly.tracing(self._settings, "distiller", self._metrics)
        folder = own_folder()
        try:
            self._distiller = assembly.distillation(
                self._settings, self._metrics, folder=folder, journal_folder=self._journal_folder, tracing=tracing
            )
            with gated(gate(self._distiller.control)):
                self._distiller.run(self.stopping.is_set)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # at once: Ray ends processes without their exit handlers
            tracing.close()

    def status(self) -> dict[str, Any]:
        """Return the fields of distill.control.Status, the process id and its memory, the metrics in Prometheus' text
        format, and the level and text of the warnings logged since the last call."""
        return {
            **asdict(Status() if self._distiller is None else self._distiller.status()),
            "pid": os.getpid(),
            "memory_bytes": psutil.Process().memory_info().rss,
            "available_bytes": available_memory(),
            "metrics": self._metrics.render().decode(),
            "warnings": self._warnings.take(),
        }

    def stop(self) -> None:
        """`run` finishes its step, publishes what was learned since the newest snapshot, and returns."""
        self.stopping.set()


def gate(control: TrainingControl) -> Callable[[], None]:
    """Return the gate of learning, which gives way to decoding unless a tenant's traffic drifts."""
    courtesy = Courtesy(_PAUSE_S)
    return lambda: None if control.is_drifting else courtesy()


def _limit_resources(settings: LearnerSettings) -> None:
    """Set priority and number of threads for the calling thread and those it starts; on Linux both are per thread."""
    import torch

    lower_priority()
    torch.set_num_threads(settings.threads or 1)
