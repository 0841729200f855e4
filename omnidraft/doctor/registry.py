"""Checks of the registry of one pair: the connection, the aliases, and the files of the versions that serve."""

import tempfile
from pathlib import Path

from omnidraft.config import Settings, masked
from omnidraft.doctor.finding import Finding, ok, problem, warning
from omnidraft.errors import SnapshotCorrupt
from omnidraft.progress import bar

SERVING = ("champion", "previous")
"""The aliases that workers load."""


def connection(settings: Settings) -> Finding:
    """Check that the versions can be listed, without creating anything."""
    from omnidraft import assembly

    check = f"registry of {settings.models.target}"
    if not settings.registry.exists:
        advice = "start a controller or a distiller, or correct registry.url (MLFLOW_TRACKING_URI)"
        return warning(check, f"nothing at {masked(settings.registry.url)} yet", advice)
    versions = assembly.existing_registry(settings).versions()
    return ok(check, f"it answers and has {len(versions)} versions")


def aliases(settings: Settings) -> Finding:
    """Check the aliases champion, challenger and previous."""
    from omnidraft import assembly

    check = f"aliases of {settings.models.target}"
    versions = assembly.existing_registry(settings).versions() if settings.registry.exists else ()
    if not versions:
        return ok(check, "no version, no alias")
    named = {alias: version.version for version in versions for alias in version.aliases}
    names = ", ".join(f"{alias} is {version}" for alias, version in sorted(named.items())) or "none"
    if "champion" not in named and "previous" in named:
        advice = "`omnidraft snapshots promote VERSION` names one that exists"
        return problem(check, f"there was a champion, and none of {len(versions)} versions is it: {names}", advice)
    if "champion" not in named:
        advice = "start the controller, or `omnidraft snapshots promote VERSION`"
        return warning(check, f"no champion, so workers serve the base drafter: {names}", advice)
    if named["champion"] == named.get("previous"):
        advice = "`omnidraft snapshots promote VERSION` with another one, so that there is something to go back to"
        return warning(check, f"a rollback would change nothing: {names}", advice)
    return ok(check, names)


def files(settings: Settings) -> Finding:
    """Fetch the versions that workers load and compare their files with the manifests' checksums."""
    from omnidraft import assembly

    check = f"files of {settings.models.target}"
    if not settings.registry.exists:
        return ok(check, "no version to look at")
    registry = assembly.existing_registry(settings)
    named = [each for each in registry.versions() if set(SERVING) & set(each.aliases)]
    with (
        tempfile.TemporaryDirectory(prefix="omnidraft-doctor-") as staging,
        bar("checksums of snapshots that serve: versions", len(named), transient=True) as advance,
    ):
        for each in named:
            try:
                registry.fetch(each.version, Path(staging))
            except SnapshotCorrupt as exc:
                advice = "`omnidraft snapshots promote` an intact version; restore this one's files from a backup"
                return problem(check, f"version {each.version} ({', '.join(each.aliases)}): {exc}", advice)
            advance()
    return ok(check, f"{len(named)} versions that serve are intact")
