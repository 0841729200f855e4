"""The distillation actor: one learner in a process of its own, rebuilt from the newest snapshot whenever it dies.

Ray gives it settings, never objects; it builds everything through wiring. A restart reruns `__init__`, and the retried
`run` goes on from the newest snapshot, so nothing lives only here.
"""

import os
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omnidraft import config
from omnidraft.hosts.process import configure_logging

OPTIONS = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 3}
"""Restarted and retried for ever; `status` and `stop` may come while `run` is under way."""


class Distiller:
    """Learns for one (drafter, target) pair."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from omnidraft import wiring
        from omnidraft.telemetry.metrics import CountingMetrics

        configure_logging()
        chosen = config.Settings.model_validate(settings)
        self._learner = chosen.learner
        self._stop = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="omnidraft-distiller-"))
        self._distillation = wiring.distillation(chosen, CountingMetrics(), folder=self._folder)

    def run(self) -> None:
        """Learn until `stop`; what was learned since the newest snapshot is published before it returns."""
        import torch

        os.nice(self._learner.nice)  # of this thread, and of the numeric threads it starts
        torch.set_num_threads(self._learner.threads or os.cpu_count() or 1)
        self._distillation.run(self._stop.is_set)

    def stop(self) -> None:
        """Let `run` finish its step and return."""
        self._stop.set()

    def status(self) -> dict[str, Any]:
        """Where it stands, and its process id."""
        return asdict(self._distillation.status()) | {"pid": os.getpid()}
