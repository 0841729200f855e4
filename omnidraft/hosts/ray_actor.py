"""The distiller inside a Ray actor: gets settings, builds everything in its own process, and starts over when killed.

Ray restarts a killed actor and calls `run` again; the newest snapshot says where to go on, so nothing else is kept.
`run` has one thread of the actor, `status` and `stop` another. This file needs no Ray: distiller.py makes the actor.
"""

import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omnidraft.config import LearnerSettings, Settings
from omnidraft.distill.distiller import Distiller
from omnidraft.hosts.process import configure_logging
from omnidraft.models.threads import lower_priority
from omnidraft.telemetry.metric_definitions import DISTILLER
from omnidraft.telemetry.metrics import PrometheusMetrics


class DistillerActor:
    """One learner of one vocabulary pair."""

    def __init__(self, settings: Settings, folder: str) -> None:
        """
        Args:
            folder: this actor's own, on the machine where it runs; snapshots are staged there.
        """
        self._settings = settings
        self._folder = Path(folder)
        self._stop = threading.Event()
        self._distillation: Distiller | None = None
        self._metrics = PrometheusMetrics(DISTILLER, settings.models.targets)

    def run(self) -> None:
        """Learn until `stop`. What is wrong with settings, log or registry is raised here, as it is."""
        from omnidraft import wiring

        configure_logging(f"distiller for {self._settings.models.target}")
        _make_modest(self._settings.learner)
        tracing = wiring.tracing(self._settings, "distiller", self._metrics)
        self._distillation = wiring.distillation(self._settings, self._metrics, folder=self._folder, tracing=tracing)
        try:
            self._distillation.run(self._stop.is_set)
        finally:
            tracing.close(self._settings.tracing.timeout_s)

    def status(self) -> dict[str, Any] | None:
        """Return the fields of distill.control.Status, the process and a scrape of its metrics; None at start."""
        if self._distillation is None:
            return None
        return {**asdict(self._distillation.status()), "pid": os.getpid(), "metrics": self._metrics.render().decode()}

    def stop(self) -> None:
        """`run` finishes its step, publishes what was learned since the newest snapshot, and returns."""
        self._stop.set()


def _make_modest(settings: LearnerSettings) -> None:
    """Priority and threads of the calling thread and of those it starts; on Linux both belong to a thread."""
    import torch

    lower_priority(settings.nice)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
