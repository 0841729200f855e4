"""Trace records without serving: score given texts with a target (teacher forcing), or let it answer prompts.

`python -m pipelines.record --answers FILE --out traces.avro`. Finished answers are kept: an interrupted run goes on
after the last. `pipelines.learn`, `replay` and `evaluate` read the archive.
"""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from omnidraft import config, prompts
from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.progress import bar
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord
from pipelines.lib.recording import Recording, RecordingLimits


def main(
    out: Annotated[Path, typer.Option(help="The archive to write.")],
    answers: Annotated[
        Path | None, typer.Option(help="Score these: JSON lines with prompt or question, and answer_ids or answer.")
    ] = None,
    prompts_path: Annotated[
        Path | None, typer.Option("--prompts", help="Let the target answer these: JSON lines with prompt or question.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Rows from the beginning of the file; all without it.")
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Rows of the file to pass over.")] = 0,
    split: Annotated[str | None, typer.Option(help="Only rows of this split, for example train.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The limit of each answer.")] = 400,
    tenant: Annotated[str | None, typer.Option(help="Named in every record; without it the file's name.")] = None,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Write an archive of trace records."""
    source = answers or prompts_path
    if source is None or (answers and prompts_path):
        raise RequestError("exactly one of --answers and --prompts is needed")
    settings = config.load(config_path, models={"target": target, "drafter": drafter})
    rows = prompts.read(source, num_prompts, skip=skip, split=split)
    parts = out.with_suffix(".parts")
    recording = Recording(
        settings, parts, RecordingLimits(max_new_tokens, tenant or source.stem), is_given=answers is not None
    )
    records: list[TraceRecord] = []
    with bar("recording", len(rows)) as advance:
        for of_prompt in recording.records_of(rows):
            records += of_prompt
            advance()
    archive.write(out, records)
    shutil.rmtree(parts)
    num_tokens = sum(len(record.emitted_ids) for record in records)
    print(f"{len(rows)} answers, {num_tokens} tokens, in {out}, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    process.entry("record", main)
