"""Replay a trace topic into the learner under several configurations, side by side, without touching live offsets.

`python -m pipelines.replay --log URL --config A.toml B.toml --json OUT`. Each configuration is an MLflow run with its
curves; the same slice, configuration and seed give the same figures. All configurations are checked before the first
learns, and OUT is written after each.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import assembly, config
from omnidraft.distill.evaluation import speedup_model
from omnidraft.distill.training.losses import parse
from omnidraft.files import save_json
from omnidraft.hosts import process
from omnidraft.whatif import log_slice
from pipelines.lib.choices import named_files
from pipelines.lib.learning import LearningPoint, TrainingRun, require_new, split_by_prompt

EXPERIMENT = "omnidraft.replay"


def main(
    log: log_slice.Log,
    configs: Annotated[list[Path], typer.Option("--config", help="TOML settings; more may follow.")],
    more_configs: Annotated[list[Path] | None, typer.Argument(help="More settings.", metavar="[MORE.toml]...")] = None,
    from_time: log_slice.FromTime = None,
    to_time: log_slice.ToTime = None,
    filters: log_slice.Filters = None,
    held_out_every: Annotated[int, typer.Option(min=2, help="One request in so many judges.")] = 8,
    measure_every: Annotated[int, typer.Option(min=1, help="Steps between points of the curves.")] = 8,
    num_passes: Annotated[int, typer.Option(min=1)] = 1,
    snapshots: Annotated[Path | None, typer.Option(help="Folder for a snapshot of each configuration.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
) -> None:
    """Compare ways to learn on one slice of traffic."""
    slice_filter = log_slice.parse_filter(from_time, to_time, filters or [])
    named_configs = named_files([*configs, *(more_configs or [])])
    if snapshots is not None:
        for name in named_configs:
            require_new(snapshots / name)
    checked = {name: _checked(path) for name, path in named_configs.items()}
    content: dict[str, Any] = {"log": log, "configs": {}}
    for name, (settings, tokenizers) in checked.items():
        log_records = log_slice.of_pair(log, settings, tokenizers, slice_filter)
        train, held_out = split_by_prompt(log_records.require(), held_out_every)
        run = TrainingRun(settings, tokenizers)
        with _TrackedRun(settings, named_configs[name], speedup_model.fit(log_records.records)) as tracked:
            options = {"num_passes": num_passes, "measure_every": measure_every}
            run.learn(train, held_out, title=name, on_point=tracked.update, **options)  # type: ignore[arg-type]
        content["configs"][name] = tracked.figures(run) | {
            "records": len(train),
            "held_out_records": len(held_out),
            "passed_over": dict(log_records.skipped),
        }
        if json_path is not None:
            save_json(content, json_path)
        if snapshots is not None:
            run.write_snapshot(snapshots / name)
    Console().print(_table(content["configs"]))


def _checked(path: Path) -> tuple[config.Settings, assembly.Vocabularies]:
    """Load a settings file and the tokenizers of its pair. Raises ConfigError, or ModelError when a model cannot be
    had."""
    settings = config.load(path)
    parse(settings.learner.loss)
    return settings, assembly.vocabularies(settings)


class _TrackedRun:
    """Logs a run's curve to MLflow, where there is one."""

    def __init__(self, settings: config.Settings, path: Path, costs: speedup_model.SpeedupModel | None) -> None:
        self._costs = costs
        self._experiment = assembly.experiment(settings, EXPERIMENT)
        self.run_id: str | None = None
        if self._experiment is not None:
            params = {name: str(value) for name, value in settings.learner.model_dump().items()}
            params |= {"target": settings.models.target, "drafter": settings.models.drafter}
            self.run_id = self._experiment.start(path.stem, params)
            self._experiment.log_file(self.run_id, path)

    def update(self, point: LearningPoint) -> None:
        if self._experiment is not None and self.run_id is not None:
            self._experiment.log(self.run_id, self._numbers(point), point.num_steps)

    def __enter__(self) -> "_TrackedRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._experiment is not None and self.run_id is not None:
            self._experiment.end(self.run_id, has_failed=kind is not None)

    def figures(self, run: TrainingRun) -> dict[str, Any]:
        """Return the fields of the report."""
        return {
            "mlflow_run": self.run_id,
            "curve": [point.plain_data() for point in run.curve],
            "agreement_before": run.curve[0].agreement,
            "agreement_after": run.curve[-1].agreement,
            "predicted_speedup": self._speedup(run.curve[-1]),
            "tokens_learned_per_s": run.tokens_per_s,
            "skipped": run.learner.counters.skipped,
        }

    def _numbers(self, point: LearningPoint) -> dict[str, float]:
        numbers = {f"loss/{name}": value for name, value in point.losses.items()}
        numbers |= {f"tokens_per_pass/{depth}": value for depth, value in point.tokens_per_pass.items()}
        speedup = self._speedup(point)
        return numbers | {"agreement": point.agreement} | ({} if speedup is None else {"predicted_speedup": speedup})

    def _speedup(self, point: LearningPoint) -> float | None:
        return None if self._costs is None else self._costs.speedup(point.tokens_per_pass)


def _table(configs: dict[str, dict[str, Any]]) -> Table:
    table = Table("configuration", "records", "agreement before", "after", "predicted speed-up", "tokens learned/s")
    for name, row in configs.items():
        speedup = row["predicted_speedup"]
        table.add_row(
            name,
            str(row["records"]),
            f"{row['agreement_before']:.3f}",
            f"{row['agreement_after']:.3f}",
            "no times in the log" if speedup is None else f"{speedup:.2f}x",
            f"{row['tokens_learned_per_s']:.0f}",
        )
    return table


if __name__ == "__main__":
    process.entry("replay", main)
