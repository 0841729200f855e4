"""`omnidraft snapshots` and `omnidraft learning`: versions of the drafter, and control of the learner."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config
from omnidraft.cli.export import export
from omnidraft.cli.options import AsJson, Config, Target, group, printable
from omnidraft.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from omnidraft.ports import ControlValue, Key, Registry, SnapshotVersion

app = group("Versions of the drafter: list, show, promote, roll back, export.")
app.command("export")(export)
learning_app = group("Pause, resume or restart learning everywhere.")


@app.command("list")
def list_snapshots(target: Target = None, config_path: Config = None, as_json: AsJson = False) -> None:
    """List all versions of the drafter for this target, with what the controller decided about each, and why."""
    versions = _registry(_settings(config_path, target)).versions()
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
    console = Console(markup=False, highlight=False)
    console.print(table)
    for each in versions:
        if each.judgement:
            console.print(f"{each.version}: {printable(each.judgement)}", soft_wrap=True)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Version, alias or latest.")],
    target: Target = None,
    config_path: Config = None,
) -> None:
    """Print the manifest of a snapshot and its judgement as JSON."""
    print(json.dumps(_as_json(_registry(_settings(config_path, target)).resolve(name)), indent=2))


@app.command("publish")
def publish(
    folder: Annotated[Path, typer.Argument(help="What `python -m pipelines.learn --out` wrote.")],
    target: Target = None,
    config_path: Config = None,
) -> None:
    """Add a snapshot folder as the newest version: the controller judges it, and a distiller continues from it."""
    from omnidraft import assembly
    from omnidraft.snapshots.bundle import read_manifest

    read_manifest(folder)  # before a registry is made for what is no snapshot
    registry = assembly.registry(_settings(config_path, target))
    versions = registry.versions()
    published = registry.publish(folder, versions[-1].version if versions else None)
    print(f"published as version {published.version}")


@app.command("promote")
def promote(
    name: Annotated[str, typer.Argument(help="Version, alias or latest.")],
    target: Target = None,
    config_path: Config = None,
) -> None:
    """Make a version the champion on every worker."""
    _promote(name, _settings(config_path, target))


@app.command("rollback")
def rollback(target: Target = None, config_path: Config = None) -> None:
    """Make the previous champion the champion again."""
    _promote("previous", _settings(config_path, target))


@app.command("sign")
def sign(
    name: Annotated[str, typer.Argument(help="Version, alias or latest; its resume part must still be there.")],
    target: Target = None,
    config_path: Config = None,
) -> None:
    """Publish a version again, signed with registry.private_key: for one from before there were keys.

    You vouch for what the registry holds.
    """
    import tempfile

    from omnidraft.snapshots import bundle

    settings = _settings(config_path, target)
    if settings.registry.private_key is None:
        raise ConfigError("registry.private_key is not set, so nothing can be signed; `omnidraft snapshots new-key`")
    registry, unverified = _registry(settings), _registry(_without_keys(settings))
    chosen, newest = registry.resolve(name), registry.resolve("latest")
    with tempfile.TemporaryDirectory(prefix="omnidraft-sign-") as folder:
        fetched = unverified.fetch(chosen.version, Path(folder), bundle.parts_of(chosen.manifest))
        print(f"published as version {registry.publish(fetched, newest.version).version}; nothing was promoted")


@app.command("new-key")
def new_key(
    role: Annotated[
        str,
        typer.Option(help="Who signs with it: distiller (snapshots), controller (what serves) or operator (both)."),
    ] = "operator",
    out: Annotated[
        Path | None, typer.Option(help="A new file for the private key, which only you can read; else it is printed.")
    ] = None,
) -> None:
    """Make a key pair: the private key for registry.private_key of one process, the public one for
    registry.trusted_keys of all."""
    from typing import cast

    from omnidraft.config.secrets import ROLES
    from omnidraft.private_files import private_opener
    from omnidraft.snapshots import keys

    if role not in ROLES:
        raise typer.BadParameter(f"{role!r} is none of {', '.join(ROLES)}", param_hint="--role")
    private_key = keys.new_private_key()
    if out is None:
        print(private_key)
    else:
        try:
            with open(out, "x", opener=private_opener) as file:
                file.write(private_key + "\n")
        except OSError as exc:
            raise typer.BadParameter(f"{out} cannot be made: {exc.strerror}", param_hint="--out") from exc
    print(keys.PrivateKey(private_key).public_text(cast(keys.Role, role)))


def _without_keys(settings: "config.Settings") -> "config.Settings":
    """Return settings of a process that neither signs nor verifies."""
    without = {"trusted_keys": (), "private_key": None}
    return settings.model_copy(update={"registry": settings.registry.model_copy(update=without)})


def _promote(name: str, settings: "config.Settings") -> None:
    from omnidraft import assembly
    from omnidraft.fleet import orders

    chosen = orders.promote(_registry(settings), assembly.ordering_log(settings), name)
    print(f"champion is version {chosen.version}")


def _settings(config_path: Path | None, target: str | None) -> "config.Settings":
    return config.load(config_path, models={"target": target})


def _registry(settings: "config.Settings") -> "Registry":
    from omnidraft import assembly

    return assembly.existing_registry(settings)


def _as_json(each: "SnapshotVersion") -> dict[str, Any]:
    return {
        "version": each.version,
        "aliases": each.aliases,
        "created_ms": each.created_ms,
        "judgement": each.judgement,
        "manifest": each.manifest.model_dump(mode="json"),
    }


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


OfTarget = Annotated[str | None, typer.Option("--target", help="For this target only; without it for all.")]


@learning_app.command("pause")
def pause_learning(target: OfTarget = None, config_path: Config = None) -> None:
    """Stop learning after the present step; serving continues."""
    from omnidraft.ports import Pause

    _order(_learning_settings(config_path, target), target, ("pause",), Pause())
    _print_order("pauses", target)


@learning_app.command("resume")
def resume_learning(target: OfTarget = None, config_path: Config = None) -> None:
    """Resume learning."""
    _order(_learning_settings(config_path, target), target, ("pause",), None)
    _print_order("resumes", target)


@learning_app.command("restart")
def restart_learning(
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="earliest: all that the log holds. latest: what comes from now on. Or offsets, as in '0:120 1:96'; "
            "partitions that are not named start at their first message.",
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(help="Or: learn on from the weights and offsets of this snapshot of a target: version or alias."),
    ] = None,
    target: OfTarget = None,
    config_path: Config = None,
) -> None:
    """Restart learning from these offsets, once: for a log that was created anew, or restored from a backup.

    Or from an earlier snapshot, which is published again as the newest: the distiller ends at its next snapshot, and
    goes on from there when it is started again.
    """
    if (start is None) == (version is None):
        raise typer.BadParameter("name either --from or --version")
    settings = _learning_settings(config_path, target)
    if version is not None:
        _republish(version, target, settings)
    elif start is not None:
        _order_restart(start, target, settings)


def _learning_settings(config_path: Path | None, target: str | None) -> "config.Settings":
    """Return the settings of the fleet. Raises RequestError when this target is none that it learns for."""
    settings = config.load(config_path)
    targets = settings.models.targets
    if target is not None and target not in targets:
        raise RequestError(f"{target!r} is none of the targets in the settings: {', '.join(targets)}")
    return settings


def _republish(version: str, target: str | None, settings: "config.Settings") -> None:
    from omnidraft.registry.republish import republish

    targets = settings.models.targets
    if target is None and len(targets) > 1:
        raise typer.BadParameter(f"each target has versions of its own: name one with --target, {', '.join(targets)}")
    settings = settings.for_target(target or settings.models.target)
    again = republish(_registry(settings), version)
    print(
        f"published as version {again.version} for {settings.models.target}: a distiller that starts now goes on from "
        f"snapshot {version}"
    )


def _order_restart(start: str, target: str | None, settings: "config.Settings") -> None:
    import uuid

    from omnidraft import assembly
    from omnidraft.ports import Restart

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
