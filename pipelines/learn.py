"""Warm a drafter up on one's own answers before it serves: record, learn, and write a snapshot folder, in one go, with
the learned texts as the fleet's memory of their tenant.

`python -m pipelines.learn --answers FILE --out DIR`. DIR is what `omnidraft generate|check`, `omnidraft run worker` and
`pipelines.bench` take as `--snapshot`.
"""

import shutil
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config, prompts, wiring
from omnidraft.distill.training.losses import parse
from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.progress import bar
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord
from pipelines.lib import report
from pipelines.lib.learning import Point, TrainingRun, learn, new_run, split_by_request, write_snapshot
from pipelines.lib.other_drafters import for_drafter
from pipelines.lib.recording import Recording, RecordingLimits


def main(
    answers: Annotated[
        Path, typer.Option(help="JSON lines with prompt or question, and answer_ids or answer; or a trace archive.")
    ],
    out: Annotated[Path, typer.Option(help="The snapshot folder to write; it must not exist.")],
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    loss: Annotated[str | None, typer.Option(help="A weighted sum, for example 'dm + 0.2 ngram'.")] = None,
    train: Annotated[str | None, typer.Option(help="full, or lora for factors beside the base weights.")] = None,
    lora_rank: Annotated[int | None, typer.Option()] = None,
    learning_rate: Annotated[float | None, typer.Option()] = None,
    num_answers: Annotated[
        int | None, typer.Option(min=2, help="Rows from the beginning of the file; all without it.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The limit of each answer.")] = 400,
    tenant: Annotated[
        str | None, typer.Option(help="Whose answers they are, who alone is drafted them; without it the file's name.")
    ] = None,
    num_passes: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 1,
    held_out_every: Annotated[int, typer.Option(min=2, help="One answer in so many judges, and is not learned.")] = 16,
    measure_every: Annotated[int | None, typer.Option(min=1, help="Steps between points of the curve.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the curve.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Teach a drafter one target's answers."""
    models = {"target": target, "drafter": drafter}
    learner = {"loss": loss, "train": train, "lora_rank": lora_rank, "learning_rate": learning_rate}
    settings = config.load(config_path, models=models, learner=learner)
    parse(settings.learner.loss)
    if out.exists():
        raise RequestError(f"{out} exists; a snapshot is written once")
    tokenizers = wiring.vocabularies(settings)
    limits = RecordingLimits(max_new_tokens, tenant or answers.stem)
    records = _records(answers, settings, tokenizers, out, num_answers, limits)
    train_records, held_out = split_by_request(records, held_out_every)
    run = new_run(settings, tokenizers)
    with bar("learning", num_passes * len(train_records)) as advance:
        options = {"num_passes": num_passes, "measure_every": measure_every}
        learn(run, train_records, held_out, settings, on_point=_print_point, advance=advance, **options)  # type: ignore[arg-type]
    write_snapshot(run, out, settings, tokenizers, remembered=train_records)
    _finish(run, out, json_path)


def _records(
    answers: Path,
    settings: config.Settings,
    tokenizers: wiring.Vocabularies,
    out: Path,
    num_answers: int | None,
    limits: RecordingLimits,
) -> list[TraceRecord]:
    """Return an archive's records, with the tenants that they name; score other answers."""
    if archive.is_archive(answers):
        recorded = islice(archive.read(answers), num_answers)
        return for_drafter(recorded, settings.models.target, settings.models.drafter, tokenizers)
    prompt_rows = prompts.read(answers, num_answers)
    parts = out.with_name(f"{out.name}.parts")
    recording = Recording(settings, parts, limits, is_given=True)
    records: list[TraceRecord] = []
    with bar("recording", len(prompt_rows)) as advance:
        for of_answer in recording.records_of(prompt_rows):
            records += of_answer
            advance()
    shutil.rmtree(parts)
    return records


def _print_point(point: Point) -> None:
    losses = "".join(f", {name} {value:.3f}" for name, value in point.losses.items())
    Console(stderr=True).print(f"{point.num_tokens} tokens learned: agreement {point.agreement:.3f}{losses}")


def _finish(run: TrainingRun, out: Path, json_path: Path | None) -> None:
    table = Table("", "agreement", *(f"chain of {depth}" for depth in run.curve[0].tokens_per_pass), title=str(out))
    for name, point in (("before", run.curve[0]), ("after", run.curve[-1])):
        table.add_row(name, f"{point.agreement:.3f}", *(f"{value:.2f}" for value in point.tokens_per_pass.values()))
    Console().print(table)
    print(f"predicted tokens per pass, on held-out answers; {run.tokens_per_s:.0f} tokens learned a second")
    if json_path is not None:
        rows = {"curve": [point.plain_data() for point in run.curve], "tokens_per_s": run.tokens_per_s}
        report.save(rows | {"skipped": run.learner.counters.skipped}, json_path)


if __name__ == "__main__":
    process.entry("learn", main)
