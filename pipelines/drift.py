"""Traffic changes, and the drafter follows: agreement over time through a change of task or of target.

`python -m pipelines.drift --targets qwen2.5-coder-0.5b --tasks gsm8k,code`. Each record is judged before it is
learned. Arms: learning with the n-gram cache, learning without it, and the drafter as it was when traffic changed.
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
from omnidraft.distill.agreement import share_of
from omnidraft.distill.learner import Learner
from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.traces.record import TraceRecord
from pipelines import report
from pipelines.paper_parts import Plan, asked, records, settings_for
from pipelines.progress import bar

ARMS = ("with n-gram cache", "without n-gram cache", "frozen at the change")
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
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    work: Annotated[Path, typer.Option(help="Where records are kept.")] = Path("runs/paper_table"),
    out: Annotated[Path, typer.Option(help="Folder of the plot.")] = Path("docs/results"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Where all figures go.")] = None,
) -> None:
    """Watch agreement through drift."""
    phases = [Phase(target.strip(), task.strip()) for target in targets.split(",") for task in tasks.split(",")]
    if len(phases) < 2:
        raise RequestError("nothing drifts: name two targets or two tasks")
    plan = Plan(data, work, num_answers, 1, max_new_tokens, drafter)
    for phase in phases:
        asked(phase.task, "train", plan)
    traffic = [(phase, records(settings_for(phase.target, plan), phase.task, "train", plan)) for phase in phases]
    made: dict[str, Any] = {"phases": [str(phase) for phase in phases], "arms": {}}
    for arm in ARMS:
        made["arms"][arm] = list(_prequential(arm, traffic, plan))
        if json_path is not None:
            report.save(made, json_path)
    name = "drift-" + "-".join(dict.fromkeys([*targets.split(","), *tasks.split(",")])).replace("/", "_")
    out.mkdir(parents=True, exist_ok=True)
    _plot(made, out / f"{name}.png")
    Console().print(f"{out / name}.png")
    _tell(made)


def _prequential(
    arm: str, traffic: Sequence[tuple[Phase, Sequence[TraceRecord]]], plan: Plan
) -> Iterator[dict[str, Any]]:
    """Agreement of every batch before it is learned."""
    learner: Learner | None = None
    num_tokens = 0
    with bar(arm, sum(len(found) for _, found in traffic)) as advance:
        for number, (phase, found) in enumerate(traffic):
            settings = settings_for(phase.target, plan)
            learner = _for_phase(learner, settings, is_new=number == 0 or phase.target != traffic[number - 1][0].target)
            size = settings.learner.records_per_step
            for batch in [found[start : start + size] for start in range(0, len(found), size)]:
                agreement = share_of(learner.hits(batch, with_cache=True))
                yield {"phase": str(phase), "num_tokens": num_tokens, "agreement": agreement}
                num_tokens += sum(len(record.emitted_ids) for record in batch)
                if arm != ARMS[2] or number == 0:
                    learner.step(batch)
                if arm == ARMS[1]:
                    learner.cache = wiring.ngram_cache(settings, wiring.vocabularies(settings), None)
                advance(len(batch))


def _for_phase(learner: Learner | None, settings: config.Settings, *, is_new: bool) -> Learner:
    """The same learner; for another target its weights go on, with a fresh cache and alignment."""
    if learner is not None and not is_new:
        return learner
    made = wiring.learner(settings, wiring.vocabularies(settings))
    if learner is not None:
        made.start_from(learner.serving_tensors())
    return made


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


if __name__ == "__main__":
    process.entry("drift", main)
