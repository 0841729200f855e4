"""Reports the progress of a distiller: its status, for whoever asks, and the metrics of its snapshots."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from omnidraft.distill.control import Status
from omnidraft.distill.evaluation.held_out import HeldOutMeasurement
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.training.learner import Learner
from omnidraft.ports import Metrics

logger = logging.getLogger(__name__)


class StatusReporter:
    """Keeps the status of one distiller, which any thread may read. Only the distiller's own thread may change it."""

    def __init__(
        self, learner: Learner, batcher: Batcher, metrics: Metrics, progress: Callable[[Status], None]
    ) -> None:
        """`progress` gets every new status, in the thread that changed it."""
        self._learner, self._batcher, self._metrics, self._progress = learner, batcher, metrics, progress
        self.status = Status()

    def update(self, **changes: Any) -> None:
        """Replace the status by one with these fields and the counters of now."""
        if changes.get("version") is not None:
            self._metrics.set("omnidraft_newest_version_info", changes["version"])
        if "waits_for" in changes:
            self._metrics.set("omnidraft_learner_blocked_info", float(changes["waits_for"] is not None))
        counters = self._learner.counters
        self.status = replace(
            self.status,
            num_steps=counters.num_steps,
            num_records=counters.num_records,
            num_tokens=counters.num_tokens,
            offsets=self._batcher.offsets(),
            skipped=counters.skipped,
            **changes,
        )
        self._progress(self.status)

    def report_snapshot(self, version: int, measured: HeldOutMeasurement, losses: Mapping[str, float]) -> None:
        """Report a snapshot that was published after steps with these mean losses."""
        agreement = measured.after
        logger.info("published snapshot %d: losses %s, agreement %s -> %s", version, losses, measured.before, agreement)
        self._metrics.add("omnidraft_snapshots_published_total")
        if agreement is not None:
            self._metrics.set("omnidraft_held_out_agreement_ratio", agreement, drafter_version=str(version))
        self.update(version=version, agreement=agreement)
