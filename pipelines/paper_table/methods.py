"""The rows of the paper's Table 1, and ours: what each learns, and what it drafts with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnidraft import config, wiring
from omnidraft.errors import ConfigError
from omnidraft.progress import bar
from pipelines.lib import report
from pipelines.lib.learning import learn, new_run, write_snapshot
from pipelines.paper_table.parts import TablePlan, fingerprint, records, settings_for
from pipelines.paper_table.result_cache import name_of

CHAIN: Mapping[str, Any] = {
    "policy": "fixed",
    "splits": False,
    "trees": False,
    "suffix_memory": False,
    "lookup": False,
}
"""Section `decode` of the paper's drafting: chains of tokens that both vocabularies have."""


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter and what it drafts with."""

    about: str
    """Its line in the legend."""
    loss: str | None = None
    """None: the weights stay as they come. `{dm}` is the plan's form of L_DM."""
    learner: Mapping[str, Any] = field(default_factory=dict)
    has_cache: bool = True
    """Whether it merges with an n-gram cache, which knows the n-grams of the train answers and learns while it
    decodes."""
    decode: Mapping[str, Any] = field(default_factory=lambda: CHAIN)
    """Its section `decode`; without a policy it is all of ours."""

    def settings(self, target: str, plan: TablePlan, **learner: Any) -> config.Settings:
        """Return the settings that it learns and drafts with, after further changes to section `learner`."""
        loss = {} if self.loss is None else {"loss": self.loss.format(dm=plan.dm)}
        num_tokens = {"num_draft_tokens": plan.num_chain_tokens} if self.decode else {}
        return settings_for(
            target,
            plan,
            learner={**self.learner, **loss, **learner},
            decode={**self.decode, **num_tokens},
            cache={"mode": "online" if self.has_cache else "off"},
        )

    def snapshot(self, target: str, task: str, plan: TablePlan, **learner: Any) -> Path | None:
        """Return the folder of what it learned from the task's train split; None where it learns nothing."""
        if self.loss is None and not self.has_cache:
            return None
        return snapshot(self.settings(target, plan, **learner), task, plan, is_trained=self.loss is not None)


METHODS: Mapping[str, Method] = {
    "spd-dm": Method("SpD_DM: the drafter as it comes, chains of direct tokens", has_cache=False),
    "ngram-pp": Method("N-gram_pp: the same with the n-gram cache, untrained"),
    "dm": Method("after learning with L_DM, without the cache", "{dm}", has_cache=False),
    "dm+ngram": Method("with 0.2 L_ngram and the cache", "{dm} + 0.2 ngram"),
    "dm+ngram-lora": Method("the same in LoRA factors of rank 32", "{dm} + 0.2 ngram", {"train": "lora"}),
    "ours-untrained": Method("splits, trees, suffix memory, cost policy; the drafter as it comes", decode={}),
    "ours": Method("the same after learning with `dm + 0.2 ngram`", "dm + 0.2 ngram", decode={}),
    "alm": Method("the same with 0.2 ALM in the place of L_ngram", "dm + 0.2 alm", decode={}),
}


def snapshot(settings: config.Settings, task: str, plan: TablePlan, *, is_trained: bool = True) -> Path:
    """Return the snapshot folder of a drafter that learned from the task's train split; made once.

    Args:
        is_trained: otherwise the n-gram cache alone learns.

    Raises:
        ConfigError: it was made from other rows.
    """
    section, target = settings.learner, settings.models.target
    folder = snapshot_folder(settings, task, plan, is_trained=is_trained)
    about = folder.with_name(f"{folder.name}.json")
    if folder.exists():
        if json.loads(about.read_text())["rows"] != fingerprint(task, plan):
            raise ConfigError(f"{folder} learned other rows of {task}; remove it, or name another --work")
        return folder
    tokenizers = wiring.vocabularies(settings)
    train, test = (records(settings_for(target, plan), task, split, plan) for split in ("train", "test"))
    run = new_run(settings, tokenizers)
    if not is_trained:
        run.learner.rebuild_cache(run.learner.cache, train)
        train = []
    with bar(f"{target}: {task} learning {section.loss if is_trained else 'n-grams alone'}", len(train)) as advance:
        learn(run, train, test, settings, advance=advance)
    report.save({"rows": fingerprint(task, plan)}, about)
    write_snapshot(run, folder, settings, tokenizers)
    return folder


def snapshot_folder(settings: config.Settings, task: str, plan: TablePlan, *, is_trained: bool) -> Path:
    """Return the folder of a snapshot, named by what it depends on: also by the settings of the records it learns."""
    recorded = settings_for(settings.models.target, plan)
    of_records = recorded.recorder, recorded.decode, recorded.cache
    name = name_of(settings.models, settings.learner, settings.cache, *of_records, task, plan, is_trained)
    return plan.work / "snapshots" / name
