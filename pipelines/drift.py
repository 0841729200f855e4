"""Agreement over time through a change of task or of target, while the drafter learns.

`python -m pipelines.drift --targets qwen2.5-coder-0.5b --tasks gsm8k,code`. Each record is scored before it is
learned. Arms: learning with the n-gram cache, learning without it, with replay, and the drafter as it was when traffic
changed. After every phase, agreement on the first phase's test answers shows what is forgotten.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console

from omnidraft import assembly, config
from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import RequestError
from omnidraft.files import save_json
from omnidraft.hosts import process
from omnidraft.pictures import picture
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from omnidraft.traces.record import TraceRecord
from pipelines.lib.recording import Recording, RecordingLimits, rows_of_split

WITHOUT_CACHE, WITH_REPLAY, FROZEN = "without n-gram cache", "with replay", "frozen at the change"
ARMS = ("with n-gram cache", WITHOUT_CACHE, WITH_REPLAY, FROZEN)
WINDOW = 3
"""The number of batches in a moving mean of the plot."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to prompts, made once and kept."""

    data: Path
    work: Path
    """Folder of records, where an interrupted run finds them again."""
    drafter: str | None
    max_new_tokens: int

    def settings(self, target: str, **sections: dict[str, Any]) -> config.Settings:
        """Return the settings of one target."""
        return config.load(None, models={"target": target, "drafter": self.drafter}, **sections)

    def prompts(self, task: str, split: str, num: int, skip: int = 0) -> list[Prompt]:
        """Return rows of a task; see rows_of_split."""
        return rows_of_split(self.data / f"{task}.jsonl", num, split, skip)

    def records(self, target: str, task: str, rows: Sequence[Prompt]) -> list[TraceRecord]:
        """Return records of the target's own answers, at temperature 0."""
        limits = RecordingLimits(self.max_new_tokens, task)
        recording = Recording(self.settings(target), self.work / "records", limits, is_given=False)
        return recording.records_of(rows, f"{target}: {task} answers")


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic of one task and one target."""

    number: int
    """1 for the first."""
    target: str
    task: str
    skip: int
    """Rows of the task that earlier phases ask."""

    def __str__(self) -> str:
        return f"{self.number}. {self.task}, {self.target}"


def main(
    targets: Annotated[str, typer.Option(help="With commas; traffic moves from one to the next.")] = (
        "qwen2.5-coder-0.5b"
    ),
    tasks: Annotated[str, typer.Option(help="Prompt files in --data, with commas; one after the other.")] = (
        "gsm8k,code"
    ),
    data: Annotated[Path, typer.Option(help="Folder of JSON lines with prompt and split.")] = Path("../shared/data"),
    drafter: Annotated[str | None, typer.Option()] = None,
    num_answers: Annotated[int, typer.Option(min=2, help="Answers of each phase.")] = 24,
    num_test: Annotated[int, typer.Option(min=1, help="Test answers of the first phase, to see what is kept.")] = 8,
    replay_records: Annotated[int, typer.Option(min=1, help="Learned again in each step, in one arm.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    work: Annotated[Path, typer.Option(help="A folder for records.")] = Path("runs/drift"),
    out: Annotated[Path, typer.Option(help="Folder of the plot.")] = Path("runs/drift"),
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
) -> None:
    """Watch agreement through drift."""
    phases = phases_of(targets.split(","), tasks.split(","), num_answers)
    if len(phases) < 2:
        raise RequestError("nothing drifts: name two targets or two tasks")
    plan, first = Answers(data, work, drafter, max_new_tokens), phases[0]
    asked = [(each, plan.prompts(each.task, "train", num_answers, each.skip)) for each in phases]
    test = plan.prompts(first.task, "test", num_test)
    out.mkdir(parents=True, exist_ok=True)
    traffic = [(each, plan.records(each.target, each.task, rows)) for each, rows in asked]
    first_test = plan.records(first.target, first.task, test)
    content: dict[str, Any] = {"phases": [str(phase) for phase in phases], "arms": {}, "kept": {}}
    for arm in ARMS:
        drift_arm = DriftArm(arm, plan, replay_records)
        content["arms"][arm] = list(drift_arm.run(traffic, first_test))
        content["kept"][arm] = drift_arm.first_phase_agreements
        if json_path is not None:
            save_json(content, json_path)
    shown = [Path(each.target).name for each in phases] + [each.task for each in phases]
    path = out / f"drift-{'-'.join(dict.fromkeys(shown))}.png"
    _print_summary(content)
    _plot(content, path)
    Console().print(str(path))


def phases_of(targets: Sequence[str], tasks: Sequence[str], num_answers: int) -> list[Phase]:
    """Return the phases in order: each asks what no earlier one has asked, also where a task or target comes back."""
    phases: list[Phase] = []
    for target in map(str.strip, targets):
        for task in map(str.strip, tasks):
            skip = num_answers * sum(each.task == task for each in phases)
            phases.append(Phase(len(phases) + 1, target, task, skip))
    return phases


class DriftArm:
    """One arm of the experiment: a learner that gets the traffic in order."""

    def __init__(self, arm: str, plan: Answers, replay_records: int) -> None:
        self._arm, self._plan = arm, plan
        self._section = {"replay_records": replay_records} if arm == WITH_REPLAY else {}
        self._learner: Learner | None = None
        self._target = ""
        self.first_phase_agreements: list[float | None] = []
        """Agreement on the first phase's test answers after each phase; None after a phase with another target."""

    def run(
        self, traffic: Sequence[tuple[Phase, Sequence[TraceRecord]]], first_test: Sequence[TraceRecord]
    ) -> Iterator[dict[str, Any]]:
        """Yield the agreement of every batch before it is learned."""
        num_tokens, first = 0, traffic[0][0]
        with bar(self._arm, sum(len(each) for _, each in traffic)) as advance:
            for phase, phase_records in traffic:
                settings = self._plan.settings(phase.target, learner=self._section)
                learner = self._learner_of(phase, settings, is_new=phase.target != self._target)
                size = settings.learner.records_per_step
                for batch in [phase_records[start : start + size] for start in range(0, len(phase_records), size)]:
                    agreement = share(learner.hits(batch, with_cache=True))
                    yield {"phase": str(phase), "num_tokens": num_tokens, "agreement": agreement}
                    num_tokens += sum(len(record.emitted_ids) for record in batch)
                    if self._arm != FROZEN or not self.first_phase_agreements:
                        learner.step(batch)
                    if self._arm == WITHOUT_CACHE:
                        learner.cache = assembly.ngram_cache(settings, assembly.vocabularies(settings), None)
                    advance(len(batch))
                is_readable = phase.target == first.target
                self.first_phase_agreements.append(
                    share(learner.hits(first_test, with_cache=True)) if is_readable else None
                )

    def _learner_of(self, phase: Phase, settings: config.Settings, *, is_new: bool) -> Learner:
        """Return the learner; for another target one with the same weights, and a new cache and alignment."""
        if is_new or self._learner is None:
            learner = assembly.learner(settings, assembly.vocabularies(settings))
            if self._learner is not None:
                learner.start_from(self._learner.serving_tensors())
            self._learner = learner
        self._target = phase.target
        return self._learner


def _plot(content: dict[str, Any], path: Path) -> None:
    with picture(path, figsize=(8, 4)) as (_, axis):
        for arm, points in content["arms"].items():
            agreements = [point["agreement"] for point in points]
            smooth = [fmean(agreements[max(0, at + 1 - WINDOW) : at + 1]) for at in range(len(agreements))]
            axis.plot([point["num_tokens"] for point in points], smooth, label=arm)
        for before, after in pairwise(content["arms"][ARMS[0]]):
            if before["phase"] != after["phase"]:
                start = after["num_tokens"]
                axis.axvline(start, color="black", linewidth=1, linestyle="--")
                axis.annotate(after["phase"], (start, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
        axis.set_xlabel("target tokens seen")
        axis.set_ylabel("agreement before learning")
        axis.set_title(f"{content['phases'][0]} first")
        axis.legend(fontsize=8)


def _print_summary(content: dict[str, Any]) -> None:
    for arm, points in content["arms"].items():
        for phase in content["phases"]:
            agreements = [point["agreement"] for point in points if point["phase"] == phase]
            print(f"{arm}, {phase}: first {agreements[0]:.3f}, mean {fmean(agreements):.3f}, last {agreements[-1]:.3f}")
        first_phase = ["-" if each is None else f"{each:.3f}" for each in content["kept"][arm]]
        print(f"{arm}, test answers of the first phase after each phase: {', '.join(first_phase)}")


if __name__ == "__main__":
    process.entry("drift", main)
