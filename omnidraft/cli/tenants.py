"""`omnidraft tenants`: forget a tenant, turn its factors off and on, and wrap all keys with a new master key."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft import config
from omnidraft.cli import tenant_factors
from omnidraft.cli.options import Config, Tenant, group, printable

if TYPE_CHECKING:
    from omnidraft.assembly.exact_forgetting import Price
    from omnidraft.assembly.tenants import TenantData
    from omnidraft.fleet.forget_orders import AffectedSnapshots
    from omnidraft.ports import Forget, SnapshotVersion

SILENCE_S = 30.0
"""Seconds without progress after which a person should look whether a distiller runs."""
app = group("Forget a tenant; turn its own factors off and on; renew the wrapping of tenants' keys.")
app.add_typer(tenant_factors.app, name="factors")


@app.command("forget")
def forget(
    tenant: Tenant,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    is_exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="In the weights too: learn the log again from before its first message, to bit for bit the snapshot "
            "of a run that never saw it, and write a certificate into this folder.",
        ),
    ] = False,
    accept_retention: Annotated[
        bool,
        typer.Option(
            "--accept-retention", help="Even if only retention deletes some of its records, or none is known."
        ),
    ] = False,
    purge_snapshots: Annotated[
        bool, typer.Option("--purge-snapshots", help="Delete the files of snapshots that learned from it, too.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for the snapshot without it, before either.")
    ] = 60.0,
    config_path: Config = None,
) -> None:
    """Destroy a tenant's key and records, and have every process forget what it has of it. Repeating it does no harm.

    Deletes for good: there is no way back. Prints what is left. Exit code 1: snapshots were to be purged, or weights to
    forget, and a distiller has not published one without the tenant yet: repeat the command. With --exact, what it
    costs is shown first; the champion serves on meanwhile, without what it remembers of the tenant.
    """
    from omnidraft.assembly import exact_forgetting, tenants
    from omnidraft.progress import bar

    settings = config.load(config_path)
    with bar(f"looking for {printable(tenant)}: messages", None, transient=True) as saw:
        data = tenants.tenant_data(settings, tenant, saw)
    print(_found(tenant, data))
    tenants.require_forgettable(settings, tenant, data, accept_retention=accept_retention)
    prices = exact_forgetting.prices(settings, tenant, data) if is_exact else {}
    for target, price in prices.items():
        _print_price(target, price)
    if not yes:
        typer.confirm("Forget it for good?", abort=True)
    with bar(f"forgetting {printable(tenant)}: messages", None, transient=True) as saw:
        done = tenants.forget(
            settings, tenant, data, is_exact=is_exact, accept_retention=accept_retention, on_message=saw
        )
    print(
        f"order {done.order.id}: {done.num_keys} keys and the content of {done.num_messages} messages destroyed, "
        "distillers and workers told"
    )
    if data.num_unprotected and settings.log.url.startswith("kafka"):
        print(f"left until Kafka's retention deletes them: {data.num_unprotected} messages that are readable")
    if data.num_unopened:
        print(f"{data.num_unopened} encrypted messages that no key here opens stay, unless retention deletes them")
    num_again = sum(price.num_messages for price in prices.values())
    is_done = not is_exact or _finish(settings, tenant, done.order, data, wait_s, num_again or None)
    if is_done and purge_snapshots:
        is_done = _purge(settings, data, done.order.id, wait_s)
    for target, snapshots in tenants.affected(settings, data, done.order.id).items():
        _print_left(target, snapshots, is_exact=is_exact, purges=purge_snapshots)
    if not is_done:
        raise typer.Exit(1)


@app.command("rewrap")
def rewrap(config_path: Config = None) -> None:
    """Wrap all tenants' keys with the first of log.encryption_keys; exit code 1 when none of them opens some key.

    After that, and once no message is left that is older than the key store, the other master keys may go.
    """
    from omnidraft.assembly import tenants

    num_done, num_closed = tenants.existing_keys(config.load(config_path)).rewrap()
    print(f"{num_done} keys wrapped with the newest master key")
    if num_closed:
        print(f"{num_closed} keys are wrapped with a key that is not among log.encryption_keys")
        raise typer.Exit(1)


def _found(tenant: str, data: "TenantData") -> str:
    found = (
        f"{printable(tenant)}: {data.num_keys} keys, {len(data.traces.positions)} trace records "
        f"({data.traces.num_readable} readable), {len(data.dead_letters.positions)} dead letters"
    )
    return found + ("" if data.is_log_whole else "; what the log has deleted since it began is not known")


def _print_price(target: str, price: "Price") -> None:
    takes = "" if price.minutes is None else f", {price.minutes:.1f} minutes for all at the best pace so far"
    print(
        f"{target}: learning goes back to snapshot {price.start} and reads up to {price.num_messages} messages{takes}"
    )


def _finish(
    settings: "config.Settings", tenant: str, order: "Forget", data: "TenantData", wait_s: float, num_again: int | None
) -> bool:
    """Return whether the weights of all targets have forgotten the tenant, for which so many messages are learned."""
    from omnidraft.assembly import exact_forgetting
    from omnidraft.progress import bar

    silent_from_s: float | None = time.monotonic()
    with bar("learning the log again: messages", num_again, transient=True) as advance:

        def watch(num: int, total: int | None) -> None:
            nonlocal silent_from_s
            advance(num, total)
            if num:
                silent_from_s = time.monotonic()
            elif silent_from_s is not None and time.monotonic() - silent_from_s > SILENCE_S:
                silent_from_s = None  # it is said once
                print(
                    f"no snapshot has learned more for {SILENCE_S:.0f} s: does a distiller run? See `omnidraft status`"
                )

        written = exact_forgetting.finish(settings, tenant, order, data, Path(), wait_s, watch)
    is_signed = settings.registry.private_key and settings.registry.trusted_keys
    how = "signed" if is_signed else "unsigned: set registry.private_key and registry.trusted_keys to sign it"
    for target, path in written.items():
        done = f"the newest weights never saw {printable(tenant)}; certificate, {how}: `omnidraft verify {path}`"
        due = "not done yet; a distiller that runs goes on without this command: repeat it for the certificate"
        print(f"{target}: {due if path is None else done}")
    return None not in written.values()


def _purge(settings: "config.Settings", data: "TenantData", forget_id: str, wait_s: float) -> bool:
    """Return whether the snapshots of all targets were purged."""
    from omnidraft.assembly import tenants
    from omnidraft.progress import bar

    num_targets = len(settings.models.targets)
    with bar("waiting for snapshots without the tenant: targets", num_targets, transient=True) as saw:
        purged = tenants.purge_snapshots(settings, data, forget_id, wait_s, saw)
    for target, versions in purged.items():
        print(f"{target}: files deleted of snapshots {', '.join(map(str, versions)) or 'none'}")
    missing = [target for target in settings.models.targets if target not in purged]
    for target in missing:
        print(
            f"{target}: nothing is deleted yet, as no snapshot without the tenant was published in {wait_s:.0f} s. "
            f"Is its distiller running? Then repeat this command"
        )
    return not missing


def _print_left(target: str, snapshots: "AffectedSnapshots", *, is_exact: bool, purges: bool) -> None:
    """Print what still knows the tenant, and how weights forget it."""
    left = [each for each in snapshots.affected if each.is_servable]
    until = "and their children, but for those that `omnidraft tenants forget --exact` has made"
    if is_exact:
        until = f"until {'this command, when it is repeated,' if purges else '--purge-snapshots'} deletes their files"
    if left:
        print(f"{target}: what weights learned from it stays in snapshots {_numbers(left)} {until}")
    until = "another one is promoted: `omnidraft snapshots promote latest`, then repeat this with --purge-snapshots"
    if is_exact or snapshots.is_catching_up:
        until = "one in which the log is learned again is promoted, which --exact orders"
    if champion := [each for each in left if "champion" in each.aliases]:
        print(
            f"{target}: the champion, snapshot {_numbers(champion)}, has an n-gram cache that counted its text, until "
            + until
        )


def _numbers(versions: "Sequence[SnapshotVersion]") -> str:
    return ", ".join(str(each.version) for each in versions)
