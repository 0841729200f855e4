"""Agreement of drafters with the target's own answers to the test prompts, beside that of the untrained drafter.

Nothing is decoded.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft import config, wiring
from omnidraft.distill.evaluation.agreement import block_efficiency
from omnidraft.progress import bar
from omnidraft.snapshots import bundle
from omnidraft.traces.record import TraceRecord
from pipelines.lib.learning import DEPTHS
from pipelines.lib.paired_gain import paired_gain
from pipelines.paper_table.methods import METHODS, snapshot
from pipelines.paper_table.parts import TablePlan, records, settings_for


class Judge:
    """Compares snapshots with the untrained drafter on the test answers of one task."""

    def __init__(self, settings: config.Settings, task: str, plan: TablePlan) -> None:
        self._tokenizers, self._test = wiring.vocabularies(settings), records(settings, task, "test", plan)
        self._untrained = wiring.learner(settings, self._tokenizers).hits(self._test, with_cache=True)

    def untrained(self) -> dict[str, Any]:
        """Return the figures of the untrained drafter, whose gain has no error."""
        return figures(self._test, self._untrained, self._untrained) | {"gain_error": None}

    def figures(
        self, settings: config.Settings, folder: Path, reference: tuple[config.Settings, Path] | None = None
    ) -> dict[str, Any]:
        """Return the figures of the snapshot in this folder, made with these settings, and its paired gain over the
        reference's snapshot."""
        hits = self._hits(settings, folder)
        measured = figures(self._test, self._untrained, hits)
        if reference is None:
            return measured
        over = paired_gain(self._test, self._hits(*reference), hits)
        return measured | {"paired_gain": over.gain, "paired_gain_error": over.gain_error}

    def _hits(self, settings: config.Settings, folder: Path) -> list[np.ndarray]:
        manifest = bundle.read_manifest(folder)
        learner = wiring.learner_from_snapshot(settings, self._tokenizers, manifest, folder)
        return learner.hits(self._test, with_cache=True)


def figures(
    records: Sequence[TraceRecord], before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Return agreement after a change, its gain and that gain's error, and tokens a pass by the length of a chain."""
    chains = {str(depth): block_efficiency(after, depth) for depth in DEPTHS}
    return asdict(paired_gain(records, before, after)) | {"tokens_per_pass": chains}


def agreement(target: str, task: str, names: Sequence[str], plan: TablePlan) -> dict[str, dict[str, Any]]:
    """Return the figures of each method's snapshot and of the untrained drafter."""
    judge = Judge(settings_for(target, plan), task, plan)
    measured = {"untrained": judge.untrained()}
    with bar(f"{target}: {task} agreement", len(names)) as advance:
        for name in names:
            folder = METHODS[name].snapshot(target, task, plan) if name in METHODS else None
            if folder is not None:
                measured[name] = judge.figures(METHODS[name].settings(target, plan), folder)
            advance()
    return measured


def learned_agreement(
    settings: config.Settings, task: str, plan: TablePlan, reference: config.Settings | None = None
) -> dict[str, Any]:
    """Return the figures of a drafter that learned the task's train answers with these settings.

    Args:
        reference: settings of the drafter that its paired gain is over; None: over none.
    """
    folder = snapshot(settings, task, plan)
    over = None if reference is None else (reference, snapshot(reference, task, plan))
    return Judge(settings, task, plan).figures(settings, folder, over)
