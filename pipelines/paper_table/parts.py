"""The size of the experiment, and records of a target's own answers.

Everything large lies in one working folder, where an interrupted run finds it again.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft import config, prompts
from omnidraft.errors import RequestError
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from omnidraft.traces.record import TraceRecord
from pipelines.lib.recording import Recording, RecordingLimits


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The size of the experiment."""

    data: Path
    work: Path
    num_train: int
    num_test: int
    max_new_tokens: int
    drafter: str | None
    num_chain_tokens: int = 4
    """Tokens of the paper's chains."""
    dm: str = "dm_paper"
    """The loss that is L_DM in the paper's rows."""


DEPENDS_ON = {"models", "decode", "cache", "learner", "recorder"}
"""Sections of the settings that figures depend on."""


def settings_for(target: str, plan: TablePlan, **sections: dict[str, Any]) -> config.Settings:
    """Return the settings of one target."""
    return config.load(None, models={"target": target, "drafter": plan.drafter}, **sections)


def prompts_of(task: str, split: str, plan: TablePlan, skip: int = 0) -> list[Prompt]:
    """Return the prompts of one task, after the first `skip` of this split.

    Raises:
        RequestError: the file is missing or too short, or does not say which rows are to be learned.
    """
    path = plan.data / f"{task}.jsonl"
    num = plan.num_train if split == "train" else plan.num_test
    read = prompts.read(path, num, skip=skip, split=split)
    if any(each.split is None for each in read):
        raise RequestError(f"{path} has rows without `split`, train or test: what is learned must not judge")
    if len(read) < num:
        raise RequestError(f"{path} has {len(read)} rows of split {split} after the first {skip}, fewer than {num}")
    return read


def fingerprint(task: str, plan: TablePlan) -> str:
    """Return a hash of what is learned and what is judged."""
    return hashlib.sha256(repr([prompts_of(task, split, plan) for split in ("train", "test")]).encode()).hexdigest()


def records(settings: config.Settings, task: str, split: str, plan: TablePlan, skip: int = 0) -> list[TraceRecord]:
    """Return records of the target's own answers to a task's prompts, at temperature 0; `skip` as in `prompts_of`."""
    recording = Recording(settings, plan.work / "records", RecordingLimits(plan.max_new_tokens, task), is_given=False)
    answers: list[TraceRecord] = []
    task_prompts = prompts_of(task, split, plan, skip)
    with bar(f"{settings.models.target}: {task} {split} answers", len(task_prompts)) as advance:
        for of_prompt in recording.records_of(task_prompts):
            answers += of_prompt
            advance()
    return answers
