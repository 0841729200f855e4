"""Agreement of the methods' snapshots on the target's own answers to the test prompts; nothing is decoded."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from omnidraft import wiring
from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.evaluation.paired_error import paired_standard_error
from omnidraft.progress import bar
from omnidraft.snapshots import bundle
from omnidraft.traces.record import TraceRecord
from pipelines.paper_table.methods import METHODS
from pipelines.paper_table.parts import TablePlan, records, settings_for


def agreement(target: str, task: str, names: Sequence[str], plan: TablePlan) -> dict[str, dict[str, Any]]:
    """Return agreement and its gain over the untrained drafter, of each method's snapshot and of that drafter."""
    settings = settings_for(target, plan)
    tokenizers, test = wiring.vocabularies(settings), records(settings, task, "test", plan)
    untrained = wiring.learner(settings, tokenizers).hits(test, with_cache=True)
    measured = {"untrained": _measured(test, untrained, untrained)}
    with bar(f"{target}: {task} agreement", len(names)) as advance:
        for name in names:
            folder = METHODS[name].snapshot(target, task, plan) if name in METHODS else None
            if folder is not None:
                manifest, own = bundle.read_manifest(folder), METHODS[name].settings(target, plan)
                hits = wiring.learner_from_snapshot(own, tokenizers, manifest, folder).hits(test, with_cache=True)
                measured[name] = _measured(test, untrained, hits)
            advance()
    return measured


def _measured(test: Sequence[TraceRecord], before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> dict[str, Any]:
    agreement, base = share(after) or 0.0, share(before) or 0.0
    is_base = after is before
    error = (
        None if is_base else paired_standard_error(zip((each.request_id for each in test), before, after, strict=True))
    )
    return {"agreement": agreement, "gain": agreement - base, "gain_error": error}
