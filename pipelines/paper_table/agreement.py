"""Agreement of the methods' snapshots on the target's own answers to the test prompts; nothing is decoded."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omnidraft import wiring
from omnidraft.progress import bar
from omnidraft.snapshots import bundle
from pipelines.lib.paired_gain import paired_gain
from pipelines.paper_table.methods import METHODS
from pipelines.paper_table.parts import TablePlan, records, settings_for


def agreement(target: str, task: str, names: Sequence[str], plan: TablePlan) -> dict[str, dict[str, Any]]:
    """Return agreement and its gain over the untrained drafter, of each method's snapshot and of that drafter."""
    settings = settings_for(target, plan)
    tokenizers, test = wiring.vocabularies(settings), records(settings, task, "test", plan)
    untrained = wiring.learner(settings, tokenizers).hits(test, with_cache=True)
    measured = {"untrained": asdict(paired_gain(test, untrained, untrained)) | {"gain_error": None}}
    with bar(f"{target}: {task} agreement", len(names)) as advance:
        for name in names:
            folder = METHODS[name].snapshot(target, task, plan) if name in METHODS else None
            if folder is not None:
                manifest, own = bundle.read_manifest(folder), METHODS[name].settings(target, plan)
                hits = wiring.learner_from_snapshot(own, tokenizers, manifest, folder).hits(test, with_cache=True)
                measured[name] = asdict(paired_gain(test, untrained, hits))
            advance()
    return measured
