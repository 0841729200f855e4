"""`omnidraft snapshots`: versions of the drafter, and which one serves."""

import ast
import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config
from omnidraft.cli.export import export
from omnidraft.cli.options import AsJson, Config, Target, age, group, printable
from omnidraft.errors import ConfigError, RegistryError, RequestError

if TYPE_CHECKING:
    from omnidraft.ports import Registry, SnapshotVersion
    from omnidraft.snapshots.manifest import Manifest

app = group("Versions of the drafter: list, show, promote, roll back, export.")
app.command("export")(export)


@app.command("list")
def list_snapshots(target: Target = None, config_path: Config = None, as_json: AsJson = False) -> None:
    """List all versions of the drafter for this target, with what the controller decided about each, and why."""
    versions = _registry(_settings(config_path, target)).versions()
    if as_json:
        print(json.dumps([_as_json(each, versions) for each in versions]))
        return
    table = Table("version", "aliases", "age", "records", "agreement", "gain (95 %)", "judgement", box=None)
    for each in versions:
        of = each.manifest
        table.add_row(
            str(each.version),
            " ".join(each.aliases),
            age(time.time() * 1000 - each.created_ms),
            str(of.num_records),
            "-" if of.agreement_after is None else f"{of.agreement_after:.3f}",
            _gain(of),
            each.judgement.state if each.judgement else "waits",
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    for each in versions:
        if each.judgement:
            console.print(f"{each.version}: {printable(str(each.judgement))}", soft_wrap=True)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Version, alias or latest.")],
    target: Target = None,
    config_path: Config = None,
) -> None:
    """Print the manifest of a snapshot and its judgement as JSON."""
    registry = _registry(_settings(config_path, target))
    print(json.dumps(_as_json(registry.resolve(name), registry.versions()), indent=2))


@app.command("publish")
def publish(
    folder: Annotated[Path, typer.Argument(help="What `omnidraft replay --snapshots` wrote.")],
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
    """Order that a version serves on every worker. The controller carries it out."""
    settings = _settings(config_path, target)
    try:
        version = _registry(settings).resolve(name).version
    except RegistryError as exc:
        if not name.isdecimal():
            raise
        print(f"the registry does not answer, so it is not known whether there is a version {name}: {exc}")
        version = int(name)
    _order(version, settings)


@app.command("rollback")
def rollback(
    to: Annotated[int | None, typer.Option("--to", help="This version; without it, the champion before.")] = None,
    is_sure: Annotated[bool, typer.Option("--yes", help="Also to a version that an operator left.")] = False,
    target: Target = None,
    config_path: Config = None,
) -> None:
    """Order that the champion before serves again, or an earlier version. The registry need not answer."""
    from omnidraft import assembly

    settings = _settings(config_path, target)
    with closing(assembly.ordering_log(settings)) as control:
        champion = control.read_whole().champion
    if champion is None or (to or champion.previous) is None:
        raise RequestError("the control log names no champion before this one: `omnidraft snapshots promote VERSION`")
    back_to = to or champion.previous or 0
    if to is None and champion.is_ordered and back_to > champion.version and not is_sure:
        raise RequestError(
            f"an operator left version {back_to} for version {champion.version}: --to VERSION goes further back, --yes "
            f"back to {back_to} all the same"
        )
    _order(back_to, settings)


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
        typer.Option(
            help="Who signs: distiller (snapshots), controller (what serves), operator (both) or worker (receipts)."
        ),
    ] = "operator",
    out: Annotated[
        Path | None, typer.Option(help="A new file for the private key, which only you can read; else it is printed.")
    ] = None,
) -> None:
    """Make a key pair: the private key for registry.private_key of one process, the public one for
    registry.trusted_keys of all; a worker's are for worker.receipt_key and for `omnidraft verify --key`."""
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


def _order(version: int, settings: "config.Settings") -> None:
    """Order that this version serves, and say what became of it. An order that waits ends the command with code 1."""
    from omnidraft import assembly

    with closing(assembly.ordering_log(settings)) as control:
        before = control.read_whole()
        serves = assembly.order_champion(settings, control, version)
    if serves is None:
        print(f"ordered: version {version}, as soon as a controller runs; none has answered yet: `omnidraft status`")
        raise typer.Exit(1)
    former = before.champion
    entry = before.entries.get(("champion",))
    was = ""
    if former is not None and entry is not None:
        by = "an operator" if former.is_ordered else "the controller"
        was = f" (was {former.version}, promoted by {by} {age(time.time() * 1000 - entry.at_ms)} ago)"
    print(f"champion is version {serves.version}{was}")


def _settings(config_path: Path | None, target: str | None) -> "config.Settings":
    return config.load(config_path, models={"target": target})


def _registry(settings: "config.Settings") -> "Registry":
    from omnidraft import assembly

    return assembly.existing_registry(settings)


def _as_json(each: "SnapshotVersion", versions: "Sequence[SnapshotVersion]") -> dict[str, Any]:
    """Return all that is known of a version, in JSON's types."""
    parents = {other.manifest.snapshot_id: other.version for other in versions}
    manifest = each.manifest.model_dump(mode="json")
    manifest["settings"] = {name: _typed(value) for name, value in each.manifest.settings.items()}
    return {
        "version": each.version,
        "parent": parents.get(each.manifest.parent_id or ""),
        "aliases": each.aliases,
        "created_ms": each.created_ms,
        "judgement": each.judgement and each.judgement.model_dump(),
        "manifest": manifest,
    }


def _typed(setting: str) -> object:
    """Return the value of a setting, which a manifest has as Python's text."""
    try:
        return ast.literal_eval(setting)
    except (ValueError, SyntaxError):
        return setting


def _gain(manifest: "Manifest") -> str:
    """Return the change of held-out agreement from the parent, with its error."""
    if manifest.agreement_before is None or manifest.agreement_after is None:
        return "-"
    gain, error = manifest.agreement_after - manifest.agreement_before, manifest.agreement_change_error
    return f"{gain:+.3f}" if error is None else f"{gain:+.3f} +- {1.96 * error:.3f}"
