"""Warm a drafter up on one's own answers before it serves: record, learn, and write a snapshot folder, in one go, with
the learned texts as the fleet's memory of their tenant.

`python -m pipelines.learn --answers FILE --out DIR`. DIR is what `omnidraft generate|check`, `omnidraft run worker` and
`pipelines.bench` take as `--snapshot`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from omnidraft.assembly.drafting import drafter_prompt
from omnidraft.errors import RequestError
from omnidraft.files import save_json
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.retokenise import retokenise

if TYPE_CHECKING:
    from omnidraft.assembly.models import Vocabularies
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import assembly, config, prompts
from omnidraft.distill.training.losses import parse
from omnidraft.files import require_writable, require_writable_file
from omnidraft.hosts import process
from omnidraft.prompts import Prompt
from omnidraft.traces import archive
from omnidraft.whatif.training_run import LearningPoint, TrainingRun, require_new, split_by_prompt
from pipelines.lib.recording import MAX_NEW_TOKENS, Recording, RecordingLimits, require_not_given

_ANY_LENGTH = 2**31
"""A learner cuts a prompt to its drafter's context itself."""


def for_drafter(
    records: Iterable[TraceRecord], target: str, drafter: str, tokenizers: "Vocabularies"
) -> list[TraceRecord]:
    """Return the records as this drafter's worker would have recorded them, without what the other one drafted.

    Raises:
        RequestError: they are another target's answers.
    """
    alignment, own = tokenizers.alignment.fingerprint, []
    for record in records:
        if record.target != target:
            raise RequestError(f"the archive has answers of {record.target}, not of {target}; name it with --target")
        own.append(record if record.alignment == alignment else _adopted(record, drafter, tokenizers))
    return own


def _adopted(record: TraceRecord, drafter: str, tokenizers: "Vocabularies") -> TraceRecord:
    ids, rest = drafter_prompt(record.prompt_ids.tolist(), tokenizers, _ANY_LENGTH)
    tail = retokenise(rest, tokenizers.target.vocabulary, tokenizers.drafter, tokenizers.alignment)
    return replace(
        record,
        drafter=drafter,
        alignment=tokenizers.alignment.fingerprint,
        snapshot_version=None,
        drafter_prompt_ids=np.array([*ids, *tail], np.uint32),
        rounds=codec.no_rounds(),
        noise_weight=None,
    )


TRAIN_SPLIT = "train"


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
        int | None, typer.Option(min=2, help="Answers from the beginning of the file; all without it.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help=f"Only rows of this split, where a file names splits; {TRAIN_SPLIT} without it."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"The limit of each answer; {MAX_NEW_TOKENS} without it.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Whose answers they are, who alone is drafted them; without it the file's name.")
    ] = None,
    num_passes: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 1,
    held_out_every: Annotated[
        int, typer.Option(min=2, help="One prompt in so many judges, but 16 or a quarter at least, and is not learned.")
    ] = 16,
    measure_every: Annotated[int | None, typer.Option(min=1, help="Steps between points of the curve.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the curve.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Teach a drafter one target's answers."""
    models = {"target": target, "drafter": drafter}
    learner = {"loss": loss, "train": train, "lora_rank": lora_rank, "learning_rate": learning_rate}
    settings = config.load(config_path, models=models, learner=learner)
    parse(settings.learner.loss)
    require_new(out)
    require_writable(out)
    require_writable_file(json_path)
    tokenizers = assembly.vocabularies(settings)
    parts = out.with_name(f"{out.name}.parts")
    if archive.is_archive(answers):
        texts_alone = {"--split": split, "--max-new-tokens": max_new_tokens, "--tenant": tenant}
        require_not_given(texts_alone, "is for texts; the records of an archive are learned as they are")
        records = _archived(answers, settings, tokenizers, num_answers)
    else:
        limits = RecordingLimits(max_new_tokens or MAX_NEW_TOKENS, tenant or answers.stem)
        recording = Recording(settings, parts, limits, is_given=True)
        records = recording.records_of(_rows(answers, num_answers, split))
    train_records, held_out = split_by_prompt(records, held_out_every)
    run = TrainingRun(settings, tokenizers)
    options = {"num_passes": num_passes, "measure_every": measure_every}
    run.learn(train_records, held_out, title="learning", on_point=_print_point, **options)  # type: ignore[arg-type]
    run.write_snapshot(out, remembered=train_records)
    if parts.exists():
        shutil.rmtree(parts)
    _finish(run, len({record.request_id for record in held_out}), out, json_path)


def _archived(
    path: Path, settings: config.Settings, tokenizers: assembly.Vocabularies, num_answers: int | None
) -> list[TraceRecord]:
    """Return an archive's records, with the tenants that they name. Raises RequestError."""
    recorded = _of_first_answers(archive.read(path), num_answers)
    return for_drafter(recorded, settings.models.target, settings.models.drafter, tokenizers)


def _of_first_answers(records: Iterable[TraceRecord], num: int | None) -> Iterator[TraceRecord]:
    """Yield all records of the first `num` answers, which may be mixed with those of others."""
    chosen: set[str] = set()
    for record in records:
        if num is None or len(chosen) < num:
            chosen.add(record.request_id)
        if record.request_id in chosen:
            yield record


def _rows(path: Path, num: int | None, split: str | None) -> list[Prompt]:
    """Return up to `num` rows of the split, of `train` where the file names splits and none is given.

    Raises:
        RequestError: the file cannot be read, or has no such rows.
    """
    named = {row.split for row in prompts.read(path) if row.split}
    if named and split is None:
        print(f"{path} names splits: {TRAIN_SPLIT} alone is learned, or what --split names", file=sys.stderr)
        split = TRAIN_SPLIT
    if named and split not in named:
        raise RequestError(f"{path} has no split {split!r}; --split is one of {', '.join(sorted(named))}")
    return prompts.read(path, num, split=split)


def _print_point(point: LearningPoint) -> None:
    losses = "".join(f", {name} {value:.3f}" for name, value in point.losses.items())
    Console(stderr=True).print(f"{point.num_tokens} tokens learned: agreement {point.agreement:.3f}{losses}")


def _finish(run: TrainingRun, num_answers: int, out: Path, json_path: Path | None) -> None:
    depths = [f"chain of {depth}" for depth in run.curve[0].tokens_per_pass]
    table = Table("", "agreement", "gain and standard error", *depths, title=str(out))
    cache_alone = run.cache_alone()
    for name, point in (("before", run.curve[0]), ("n-gram cache alone", cache_alone), ("after", run.curve[-1])):
        gain = "" if point is run.curve[0] else f"{point.gain:+.3f} +- {point.gain_error:.3f}"
        table.add_row(name, f"{point.agreement:.3f}", gain, *(f"{each:.2f}" for each in point.tokens_per_pass.values()))
    Console().print(table)
    print(
        f"predicted tokens per pass, on {num_answers} held-out answers; {run.tokens_per_s:.0f} tokens learned a second"
    )
    _warn_of_a_loss(run.curve[0], run.curve[-1])
    if json_path is not None:
        rows = {"curve": [point.plain_data() for point in run.curve], "cache_alone": cache_alone.plain_data()}
        save_json(rows | {"tokens_per_s": run.tokens_per_s, "skipped": run.learner.counters.skipped}, json_path)


def _warn_of_a_loss(before: LearningPoint, after: LearningPoint) -> None:
    """Say what to do where learning made the drafter worse, as steps that are too large for a good one do."""
    if after.agreement < before.agreement:
        print(
            f"agreement fell from {before.agreement:.3f} to {after.agreement:.3f}, so this snapshot drafts worse than "
            "the drafter before: learn with learner.train = 'lora', or with a smaller learner.learning_rate",
            file=sys.stderr,
        )


if __name__ == "__main__":
    process.entry("learn", main)
