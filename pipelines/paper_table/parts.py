"""Records of a target's own answers and snapshots learned from them, for the cells of the paper's table.

Everything large lies in one working folder, where an interrupted run finds it again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft import config, prompts, wiring
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from omnidraft.traces.record import TraceRecord
from pipelines.lib.learning import learn, new_run, write_snapshot
from pipelines.lib.recording import Recording, RecordingLimits
from pipelines.paper_table.result_cache import name_of

UNTRAINED = "dm-untrained"
METHODS: dict[str, str | None] = {
    UNTRAINED: None,
    "dm": "dm",
    "dm+ngram": "dm + 0.2 ngram",
    "alm": "dm + 0.2 alm",
}
"""Method -> the loss of its drafter; None learns nothing. All but `dm-untrained` and `dm` have the n-gram cache."""
WITHOUT_CACHE = (UNTRAINED, "dm")


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The size of the experiment."""

    data: Path
    work: Path
    num_train: int
    num_test: int
    max_new_tokens: int
    drafter: str | None


def settings_for(target: str, plan: TablePlan, **sections: dict[str, Any]) -> config.Settings:
    """Return the settings of one target."""
    return config.load(None, models={"target": target, "drafter": plan.drafter}, **sections)


def prompts_of(task: str, split: str, plan: TablePlan) -> list[Prompt]:
    """Return the prompts of one task. Raises RequestError when the file is missing or too short."""
    number = plan.num_train if split == "train" else plan.num_test
    return prompts.read(plan.data / f"{task}.jsonl", number, split=split)


def records(settings: config.Settings, task: str, split: str, plan: TablePlan) -> list[TraceRecord]:
    """Return records of the target's own answers to a task's prompts, at temperature 0."""
    recording = Recording(settings, plan.work / "records", RecordingLimits(plan.max_new_tokens, task), is_given=False)
    answers: list[TraceRecord] = []
    task_prompts = prompts_of(task, split, plan)
    with bar(f"{settings.models.target}: {task} {split} answers", len(task_prompts)) as advance:
        for of_prompt in recording.records_of(task_prompts):
            answers += of_prompt
            advance()
    return answers


def snapshot(settings: config.Settings, task: str, method: str, plan: TablePlan) -> Path | None:
    """Return the snapshot folder that this method learned from the task's train split; None for the base drafter."""
    loss = METHODS[method]
    if loss is None:
        return None
    section = settings.learner.model_copy(update={"loss": loss})
    settings = settings.model_copy(update={"learner": section})
    folder = plan.work / "snapshots" / name_of(settings.models, section, task, method, plan)
    if folder.exists():
        return folder
    tokenizers = wiring.vocabularies(settings)
    train, test = records(settings, task, "train", plan), records(settings, task, "test", plan)
    run = new_run(settings, tokenizers)
    with bar(f"{settings.models.target}: {task} learning {method}", len(train)) as advance:
        learn(run, train, test, settings, advance=advance)
    if method in WITHOUT_CACHE:
        run.learner.cache = wiring.ngram_cache(settings, tokenizers, None)
    write_snapshot(run, folder, settings, tokenizers, num_held_out=len(test))
    return folder


def learn_and_measure(settings: config.Settings, task: str, plan: TablePlan) -> dict[str, Any]:
    """Return agreement and tokens per pass on the test split after learning the train split; nothing is decoded."""
    tokenizers = wiring.vocabularies(settings)
    train, test = records(settings, task, "train", plan), records(settings, task, "test", plan)
    run = new_run(settings, tokenizers)
    with bar(f"{settings.models.target}: {task} {_kind(settings)}", len(train)) as advance:
        learn(run, train, test, settings, advance=advance)
    before, after = run.curve[0], run.curve[-1]
    figures = {"agreement_before": before.agreement, "agreement": after.agreement, "tokens_per_s": run.tokens_per_s}
    return figures | {"tokens_per_pass": after.tokens_per_pass, "num_ngrams": len(run.learner.cache)}


def _kind(settings: config.Settings) -> str:
    section = settings.learner
    return f"LoRA rank {section.lora_rank}" if section.train == "lora" else "full weights"
