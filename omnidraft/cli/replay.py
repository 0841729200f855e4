"""`omnidraft replay`: learn one slice of recorded traffic, or an archive, under several settings, side by side."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft.cli.choices import archive_or_url
from omnidraft.cli.options import Config
from omnidraft.errors import RequestError

if TYPE_CHECKING:
    from omnidraft.config import Settings
    from omnidraft.whatif.training_run import LearningPoint, TrainingRun

AS_SET = "as-set"
"""The name of the settings without a variation."""
EXPERIMENT = "omnidraft.replay"


def replay(
    log: Annotated[str | None, typer.Option(help="sqlite:///path, kafka://host:port, or a trace archive.")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="SETTING=VALUE, such as learner.loss=nll, for one more run; may be given again."),
    ] = None,
    since: Annotated[str | None, typer.Option(help="Answers of the last 90m, 24h or 7d; or since an ISO time.")] = None,
    until: Annotated[str | None, typer.Option(help="Answers that ended before this ISO time.")] = None,
    filters: Annotated[
        list[str] | None, typer.Option("--filter", help="name=value,...: target, drafter, tenant, worker, mode, ...")
    ] = None,
    held_out_every: Annotated[int, typer.Option(min=2, help="The answers to one prompt in so many judge.")] = 8,
    measure_every: Annotated[int, typer.Option(min=1, help="Steps between points of the curves.")] = 8,
    num_passes: Annotated[int, typer.Option(min=1, help="Passes over the slice.")] = 1,
    snapshots: Annotated[Path | None, typer.Option(help="A folder for a snapshot of each run.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG.")] = None,
    target: Annotated[str | None, typer.Option(help="The target of the pair.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="The drafter that learns; an archive's answers teach any.")
    ] = None,
    config_path: Config = None,
) -> None:
    """Learn recorded traffic: under several settings, compared on the same held-out answers, or once before serving.

    The first run, `as-set`, has the settings as they are, each --vary one more with that change. It reads beside the
    learner and moves no offset; the same slice, settings and seed give the same figures. Where there is MLflow, each
    run is one there with its curves. A snapshot, SNAPSHOTS/as-set or SNAPSHOTS/VARIATION, remembers the learned texts
    for their tenants; `omnidraft whatif --drafter base,SNAPSHOTS/NAME` judges its speed.
    """
    from omnidraft import assembly
    from omnidraft.files import require_writable_file, save_json
    from omnidraft.pictures import require_format
    from omnidraft.whatif import log_slice
    from omnidraft.whatif.training_run import TrainingRun, split_by_prompt, tracked

    for path in (json_path, picture):
        require_writable_file(path)
    require_format(picture)
    slice_filter = log_slice.parse_filter(since, until, filters or [])
    archive_path, url = archive_or_url(log)
    given = {"models": {"target": target, "drafter": drafter}, "log": {"url": url}}
    varied = varied_settings(config_path, vary or [], given)
    folders = {name: snapshots / name.replace("/", "-") for name in varied} if snapshots is not None else {}
    for folder in folders.values():
        if folder.exists():
            raise RequestError(f"{folder} exists; a snapshot is written once")
    if archive_path is None:
        assembly.require_log(varied[AS_SET])
    tokenizers = {name: assembly.vocabularies(settings) for name, settings in varied.items()}
    runs: dict[str, TrainingRun] = {}
    content: dict[str, Any] = {"log": log, "runs": {}}
    for name, settings in varied.items():
        found = log_slice.of_pair(archive_path, settings, tokenizers[name], slice_filter)
        train, held_out = split_by_prompt(found.require(), held_out_every)
        run = runs[name] = TrainingRun(settings, tokenizers[name])
        with tracked(settings, EXPERIMENT, name) as (run_id, on_point):
            options = {"num_passes": num_passes, "measure_every": measure_every}
            run.learn(train, held_out, title=name, on_point=on_point, **options)  # type: ignore[arg-type]
        figures = {"records": len(train), "held_out_records": len(held_out), "passed_over": dict(found.skipped)}
        content["runs"][name] = run.figures() | figures | run.compared_with(runs[AS_SET]) | {"mlflow_run": run_id}
        if json_path is not None:
            save_json(content, json_path)
        if name in folders:
            run.write_snapshot(folders[name])
        _warn_of_a_loss(name, run.curve)
    Console().print(_table(content["runs"]))
    if picture is not None:
        _draw(runs, picture)


def varied_settings(path: Path | None, variations: list[str], given: dict[str, Any]) -> dict[str, "Settings"]:
    """Return the settings with what is given, and with each change, by what names the run. Raises RequestError where a
    variation is not SETTING=VALUE, ConfigError where there is no such setting, or a loss is unknown."""
    from omnidraft.config import load
    from omnidraft.distill.training.losses import parse

    varied = {AS_SET: load(path, **given)}
    for text in variations:
        name, sign, value = text.partition("=")
        *sections, field = name.strip().split(".")
        if not sign or not sections:
            raise RequestError(f"--vary takes SETTING=VALUE, such as learner.loss=nll, got {text!r}")
        change: dict[str, Any] = {field: value.strip()}
        for section in reversed(sections[1:]):
            change = {section: change}
        varied[text] = load(path, **given | {sections[0]: given.get(sections[0], {}) | change})
    for settings in varied.values():
        parse(settings.learner.loss)
    return varied


def _table(runs: dict[str, dict[str, Any]]) -> Table:
    gains = ("gain", "of n-gram cache alone", f"beside {AS_SET}")
    headings = ("run", "agreement before", "after", *gains, "chain of 4", "tokens learned/s")
    table = Table(*headings, caption="Agreement on the same held-out answers; behind +-, one standard error")
    for name, row in runs.items():
        last = row["curve"][-1]
        beside = "" if name == AS_SET else f"{row['beside']:+.3f} +- {row['beside_error']:.3f}"
        gain, alone = (f"{each['gain']:+.3f} +- {each['gain_error']:.3f}" for each in (last, row["cache_alone"]))
        agreements = [f"{point['agreement']:.3f}" for point in (row["curve"][0], last)]
        chain, pace = f"{last['tokens_per_pass'][4]:.2f}", f"{row['tokens_per_s'] or 0:.0f}"
        table.add_row(name, *agreements, gain, alone, beside, chain, pace)
    return table


def _warn_of_a_loss(name: str, curve: list["LearningPoint"]) -> None:
    """Say what to do where learning made the drafter worse, as steps that are too large for a good one do."""
    before, after = curve[0].agreement, curve[-1].agreement
    if after < before:
        print(
            f"{name}: agreement fell from {before:.3f} to {after:.3f}, so it drafts worse than the drafter before: "
            "learn with learner.train = 'lora', or with a smaller learner.learning_rate",
            file=sys.stderr,
        )


def _draw(runs: dict[str, "TrainingRun"], path: Path) -> None:
    from omnidraft.pictures import picture

    with picture(path, figsize=(8, 4.5), layout="tight") as (_, axis):
        for name, run in runs.items():
            tokens, agreements = zip(*((point.num_tokens, point.agreement) for point in run.curve), strict=True)
            axis.errorbar(tokens, agreements, yerr=[point.gain_error for point in run.curve], capsize=3, label=name)
        axis.set(xlabel="tokens learned; bars: standard error of the gain", ylabel="agreement on held-out answers")
        axis.grid(alpha=0.3)
        axis.legend()
