"""`omnidraft tenants factors`: which tenants draft with factors of their own; turn one's off or on."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft import config
from omnidraft.cli.options import AsJson, Config, Target, Tenant, group, printable

if TYPE_CHECKING:
    from omnidraft.snapshots.manifest import TenantFactors

app = group("Tenants' own low-rank factors of the drafter: list them, turn one's off or on.")


@app.command("list")
def list_factors(
    snapshot: Annotated[str, typer.Option(help="A version or alias.")] = "champion",
    target: Target = None,
    as_json: AsJson = False,
    config_path: Config = None,
) -> None:
    """List the tenants that have factors in a snapshot, and what these gain on their held-out requests."""
    from omnidraft import assembly

    settings = config.load(config_path, models={"target": target})
    manifest = assembly.existing_registry(settings).resolve(snapshot).manifest
    if as_json:
        print(json.dumps([each.model_dump(mode="json") for each in manifest.tenant_factors]))
        return
    for each in manifest.tenant_factors:
        print(f"{printable(each.tenant)}: {_described(each)}")
    if not manifest.tenant_factors:
        print("no tenant has factors of its own; see learner.tenant_factors")


@app.command("off")
def turn_off(tenant: Tenant, config_path: Config = None) -> None:
    """Draft for a tenant without its factors, on every worker and for every target, until they are turned on again.

    They go on learning. Texts that have begun keep what they began with.
    """
    _order(tenant, config_path, is_on=False)


@app.command("on")
def turn_on(tenant: Tenant, config_path: Config = None) -> None:
    """Draft for a tenant with its factors again, where a snapshot has some that are better."""
    _order(tenant, config_path, is_on=True)


def _order(tenant: str, config_path: Config, *, is_on: bool) -> None:
    from omnidraft import assembly
    from omnidraft.ports import FactorsOff

    assembly.ordering_log(config.load(config_path)).put(("factors", tenant), None if is_on else FactorsOff())
    print(f"{printable(tenant)}: factors {'on' if is_on else 'off'}, every worker is told")


def _described(each: "TenantFactors") -> str:
    error = "" if each.change_error is None else f" +- {1.96 * each.change_error:.4f} (95 %)"
    verdict = "in use" if each.file is not None else "not in use: not better beyond the error"
    return (
        f"fit {each.version} of rank {each.rank}, agreement {each.before:.4f} -> {each.after:.4f}{error} on "
        f"{each.num_requests} requests, {verdict}"
    )
