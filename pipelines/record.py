"""Trace records without serving: score given texts with a target (teacher forcing), let it answer prompts, or take the
log-probabilities that somebody else's API told.

`python -m pipelines.record --answers FILE --out traces.avro`. Finished answers are kept: an interrupted run goes on
after the last. `omnidraft replay` and `omnidraft whatif` read the archive.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from omnidraft import config, prompts
from omnidraft.errors import RequestError
from omnidraft.files import require_writable_file
from omnidraft.hosts import process
from omnidraft.progress import bar
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord
from pipelines.lib import api_answers
from pipelines.lib.api_answers import ApiExchange
from pipelines.lib.api_recording import ApiRecording
from pipelines.lib.recording import MAX_NEW_TOKENS, Recording, RecordingLimits, require_not_given


def main(
    out: Annotated[Path, typer.Option(help="The archive to write.")],
    answers: Annotated[
        Path | None, typer.Option(help="Score these: JSON lines with prompt or question, and answer_ids or answer.")
    ] = None,
    prompts_path: Annotated[
        Path | None, typer.Option("--prompts", help="Let the target answer these: JSON lines with prompt or question.")
    ] = None,
    from_api: Annotated[
        Path | None,
        typer.Option(
            "--from-api",
            help="Take these: JSON lines with the request and the response of chat completions with logprobs, of an "
            "API whose model has the target's tokenizer. The target does not run.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Rows from the beginning of the file; all without it.")
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Rows of the file to pass over.")] = 0,
    split: Annotated[str | None, typer.Option(help="Only rows of this split, for example train.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"The limit of each answer; {MAX_NEW_TOKENS} without it.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Named in every record; without it the file's name.")] = None,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Write an archive of trace records."""
    sources = [path for path in (answers, prompts_path, from_api) if path is not None]
    if len(sources) != 1:
        raise RequestError("exactly one of --answers, --prompts and --from-api is needed")
    (source,) = sources
    require_writable_file(out)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    settings = config.load(config_path, models={"target": target, "drafter": drafter})
    if from_api is not None:
        prompts_alone = {"--split": split, "--max-new-tokens": max_new_tokens}
        require_not_given(prompts_alone, "is for prompts; responses are taken as they are")
        _import(settings, api_answers.read(from_api, num_prompts, skip=skip), tenant or source.stem, out)
        return
    rows = prompts.read(source, num_prompts, skip=skip, split=split)
    parts = out.with_suffix(".parts")
    limits = RecordingLimits(max_new_tokens or MAX_NEW_TOKENS, tenant or source.stem)
    recording = Recording(settings, parts, limits, is_given=answers is not None)
    _write(out, recording.records_of(rows))
    shutil.rmtree(parts)


def _import(settings: config.Settings, exchanges: Sequence[ApiExchange], tenant: str, out: Path) -> None:
    """Write the archive of an API's responses, and count what is not in it. Raises RequestError when nothing is."""
    recording = ApiRecording(settings, tenant)
    records: list[TraceRecord] = []
    with bar("importing", len(exchanges)) as advance:
        for exchange in exchanges:
            records += recording.records_of(exchange)
            advance()
    refused = [f"refused {num} answers {reason}" for reason, num in recording.refused.most_common()]
    if not records:
        raise RequestError(f"nothing to learn of {settings.models.target} in these responses: {'; '.join(refused)}")
    print(*refused, sep="\n", end="\n" if refused else "", file=sys.stderr)
    _write(out, records)


def _write(out: Path, records: list[TraceRecord]) -> None:
    archive.write(out, records)
    num_tokens = sum(len(record.emitted_ids) for record in records)
    num_answers = len({record.request_id for record in records})
    print(f"{num_answers} answers, {num_tokens} tokens, in {out}, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    process.entry("record", main)
