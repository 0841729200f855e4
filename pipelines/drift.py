"""Traffic changes, and the drafter follows: agreement over time through a change of task or of target.

`python -m pipelines.drift --targets qwen2.5-coder-0.5b --tasks gsm8k,code`. Each record is judged before it is
learned. Arms: learning with the n-gram cache, learning without it, with replay, and the drafter as it was when traffic
changed. What is kept of the first phase is judged on its test answers, after every phase.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console

from omnidraft import config, wiring
from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.traces.record import TraceRecord
from pipelines.lib import report
from pipelines.lib.progress import bar
from pipelines.paper_table.parts import TablePlan, answered, records, settings_for

WITHOUT_CACHE, WITH_REPLAY, FROZEN = "without n-gram cache", "with replay", "frozen at the change"
ARMS = ("with n-gram cache", WITHOUT_CACHE, WITH_REPLAY, FROZEN)
WINDOW = 3
"""Batches that a point of the plot is the mean of."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic of one kind."""

    target: str
    task: str

    def __str__(self) -> str:
        return f"{self.task}, {self.target}"


def main(
    targets: Annotated[str, typer.Option(help="With commas; traffic moves from one to the next.")] = (
        "qwen2.5-coder-0.5b"
    ),
    tasks: Annotated[str, typer.Option(help="Prompt files in --data, with commas; one after the other.")] = (
        "gsm8k,code"
    ),
    data: Annotated[Path, typer.Option(help="Folder of JSON lines with prompt and split.")] = Path("../shared/data"),
    drafter: Annotated[str | None, typer.Option()] = None,
    num_answers: Annotated[int, typer.Option(min=2, help="Of each phase.")] = 24,
    num_test: Annotated[int, typer.Option(min=1, help="Test answers of the first phase, to see what is kept.")] = 8,
    replay_records: Annotated[int, typer.Option(min=1, help="Learned again in each step, in one arm.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    work: Annotated[Path, typer.Option(help="Where records are kept.")] = Path("runs/paper_table"),
    out: Annotated[Path, typer.Option(help="Folder of the plot.")] = Path("docs/results"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Where all figures go.")] = None,
) -> None:
    """Watch agreement through drift."""
    phases = [Phase(target.strip(), task.strip()) for target in targets.split(",") for task in tasks.split(",")]
    if len(phases) < 2:
        raise RequestError("nothing drifts: name two targets or two tasks")
    plan = TablePlan(data, work, num_answers, num_test, max_new_tokens, drafter)
    for phase in phases:
        answered(phase.task, "train", plan)
    answered(phases[0].task, "test", plan)
    traffic = [(phase, records(settings_for(phase.target, plan), phase.task, "train", plan)) for phase in phases]
    kept = records(settings_for(phases[0].target, plan), phases[0].task, "test", plan)
    made: dict[str, Any] = {"phases": [str(phase) for phase in phases], "arms": {}, "kept": {}}
    for arm in ARMS:
        run = Following(arm, plan, replay_records)
        made["arms"][arm] = list(run.through(traffic, kept))
        made["kept"][arm] = run.kept
        if json_path is not None:
            report.save(made, json_path)
    names = [Path(target.strip()).name for target in targets.split(",")] + [task.strip() for task in tasks.split(",")]
    picture = out / f"drift-{'-'.join(dict.fromkeys(names))}.png"
    out.mkdir(parents=True, exist_ok=True)
    _plot(made, picture)
    Console().print(str(picture))
    _tell(made)


class Following:
    """One arm: a learner on its way through the traffic."""

    def __init__(self, arm: str, plan: TablePlan, replay_records: int) -> None:
        self._arm, self._plan = arm, plan
        self._section = {"replay_records": replay_records} if arm == WITH_REPLAY else {}
        self._learner: Learner | None = None
        self._target = ""
        self.kept: list[float | None] = []
        """Agreement on the first phase's test answers, after each phase with the first phase's target."""

    def through(
        self, traffic: Sequence[tuple[Phase, Sequence[TraceRecord]]], kept: Sequence[TraceRecord]
    ) -> Iterator[dict[str, Any]]:
        """Agreement of every batch before it is learned."""
        num_tokens, first = 0, traffic[0][0]
        with bar(self._arm, sum(len(found) for _, found in traffic)) as advance:
            for phase, found in traffic:
                settings = settings_for(phase.target, self._plan, learner=self._section)
                learner = self._enter(phase, settings, is_new=phase.target != self._target)
                size = settings.learner.records_per_step
                for batch in [found[start : start + size] for start in range(0, len(found), size)]:
                    agreement = share(learner.hits(batch, with_cache=True))
                    yield {"phase": str(phase), "num_tokens": num_tokens, "agreement": agreement}
                    num_tokens += sum(len(record.emitted_ids) for record in batch)
                    if self._arm != FROZEN or not self.kept:
                        learner.step(batch)
                    if self._arm == WITHOUT_CACHE:
                        learner.cache = wiring.ngram_cache(settings, wiring.vocabularies(settings), None)
                    advance(len(batch))
                is_readable = phase.target == first.target
                self.kept.append(share(learner.hits(kept, with_cache=True)) if is_readable else None)

    def _enter(self, phase: Phase, settings: config.Settings, *, is_new: bool) -> Learner:
        """The same learner; for another target its weights go on, with a fresh cache and alignment."""
        if is_new or self._learner is None:
            made = wiring.learner(settings, wiring.vocabularies(settings))
            if self._learner is not None:
                made.start_from(self._learner.serving_tensors())
            self._learner = made
        self._target = phase.target
        return self._learner


def _plot(made: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4))
    for arm, points in made["arms"].items():
        found = [point["agreement"] for point in points]
        smooth = [fmean(found[max(0, at + 1 - WINDOW) : at + 1]) for at in range(len(found))]
        axis.plot([point["num_tokens"] for point in points], smooth, label=arm)
    points = made["arms"][ARMS[0]]
    for before, after in pairwise(points):
        if before["phase"] != after["phase"]:
            axis.axvline(after["num_tokens"], color="black", linewidth=1, linestyle="--")
            axis.annotate(after["phase"], (after["num_tokens"], 0.02), xycoords=("data", "axes fraction"), fontsize=8)
    axis.set_xlabel("target tokens seen")
    axis.set_ylabel("agreement before learning")
    axis.set_title(f"{made['phases'][0]} first")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _tell(made: dict[str, Any]) -> None:
    for arm, points in made["arms"].items():
        for phase in made["phases"]:
            found = [point["agreement"] for point in points if point["phase"] == phase]
            print(f"{arm}, {phase}: first {found[0]:.3f}, mean {fmean(found):.3f}, last {found[-1]:.3f}")
        kept = ["-" if each is None else f"{each:.3f}" for each in made["kept"][arm]]
        print(f"{arm}, test answers of the first phase after each phase: {', '.join(kept)}")


if __name__ == "__main__":
    process.entry("drift", main)
