"""`omnidraft learning`: control of the learner."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft import config
from omnidraft.cli.options import Config, group
from omnidraft.errors import RequestError

if TYPE_CHECKING:
    from omnidraft.ports import ControlValue, Key

app = group("Pause, resume, restart or rewind learning everywhere.")

OfTarget = Annotated[str | None, typer.Option("--target", help="For this target only; without it for all.")]


@app.command("pause")
def pause_learning(target: OfTarget = None, config_path: Config = None) -> None:
    """Stop learning after the present step; serving continues."""
    from omnidraft.ports import Pause

    _order(_learning_settings(config_path, target), target, ("pause",), Pause())
    _print_order("pauses", target)


@app.command("resume")
def resume_learning(target: OfTarget = None, config_path: Config = None) -> None:
    """Resume learning."""
    _order(_learning_settings(config_path, target), target, ("pause",), None)
    _print_order("resumes", target)


@app.command("restart")
def restart_learning(
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="earliest: all that the log holds. latest: what comes from now on. Or offsets, as in '0:120 1:96'; "
            "partitions that are not named start at their first message.",
        ),
    ],
    target: OfTarget = None,
    config_path: Config = None,
) -> None:
    """Restart learning from these offsets, once: for a log that was created anew, or restored from a backup."""
    import uuid

    from omnidraft import assembly
    from omnidraft.ports import Restart

    settings = _learning_settings(config_path, target)
    assembly.require_log(settings)
    offsets = " ".join(start.replace(",", " ").split())
    if offsets == "latest":
        offsets = _latest_offsets(settings)
    try:
        order = Restart(start=offsets, id=uuid.uuid4().hex)
    except ValueError as exc:
        raise typer.BadParameter(f"{start!r} is not earliest, latest or offsets such as '0:120 1:96'") from exc
    _order(settings, target, ("restart",), order)
    _print_order(f"restarts from {offsets}", target)


@app.command("rewind")
def rewind_learning(
    name: Annotated[str, typer.Argument(help="Version or alias.")],
    target: OfTarget = None,
    config_path: Config = None,
) -> None:
    """Go back to the weights of an earlier version, once, and learn on from the present place in the log."""
    from omnidraft import assembly
    from omnidraft.ports import Rewind

    settings = _learning_settings(config_path, target)
    targets = settings.models.targets
    if target is None and len(targets) > 1:
        raise typer.BadParameter(f"each target has versions of its own: name one with --target, {', '.join(targets)}")
    pair = settings.for_target(target or settings.models.target)
    registry = assembly.existing_registry(pair)
    version, newest = registry.resolve(name), registry.resolve("latest")
    if version.version == newest.version or not version.is_servable:
        why = "is the newest" if version.is_servable else "has no weights any more (registry.keep_serving)"
        raise RequestError(f"version {version.version} {why}, so learning cannot go back to it")
    order = Rewind(version=version.version, id=newest.manifest.snapshot_id, is_ordered=True)
    _order(pair, pair.models.target, ("rewind",), order)
    _print_order(f"goes back to version {version.version}", pair.models.target)


def _learning_settings(config_path: Path | None, target: str | None) -> "config.Settings":
    """Return the settings of the fleet. Raises RequestError when this target is none that it learns for."""
    settings = config.load(config_path)
    targets = settings.models.targets
    if target is not None and target not in targets:
        raise RequestError(f"{target!r} is none of the targets in the settings: {', '.join(targets)}")
    return settings


def _order(settings: "config.Settings", target: str | None, key: "Key", value: "ControlValue | None") -> None:
    """Put this on the control log, for one target or for all."""
    from omnidraft import assembly

    for each in settings.models.targets if target is None else (target,):
        assembly.ordering_log(settings.for_target(each)).put(key, value)


def _latest_offsets(settings: "config.Settings") -> str:
    """Return the ends of the trace log now: what comes later is learned, whenever a distiller hears of the order."""
    from contextlib import closing

    from omnidraft import assembly

    with closing(assembly.log_reader(settings, settings.log.traces_topic)) as reader:
        return " ".join(f"{partition}:{offset}" for partition, offset in sorted(reader.end_offsets().items()))


def _print_order(what: str, target: str | None) -> None:
    print(f"ordered: learning {what} for {target or 'all targets'}, as soon as the distiller hears of it")
