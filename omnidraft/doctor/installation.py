"""Checks of the Python version and the libraries against the package's metadata. Imports none of the libraries."""

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from omnidraft.config import Settings
from omnidraft.doctor.finding import Finding, ok, problem, warning
from omnidraft.extras import MODULES, distiller_needs_ray, driver_of
from omnidraft.files import existing_ancestor, may_write

PACKAGE = "omnidraft"


def python() -> Finding:
    """Compare the running Python with `requires-python`."""
    from packaging.specifiers import SpecifierSet

    running = platform.python_version()
    if (package := _metadata()) is None:
        return warning("python", f"{running}; {PACKAGE} is not installed as a package", "`make setup`, or pip install")
    required = package["Requires-Python"]
    if SpecifierSet(required).contains(running, prereleases=True):
        return ok("python", f"{running}, wanted {required}")
    return problem("python", f"{running}, wanted {required}", "make a virtual environment with that Python")


def libraries(settings: Settings | None) -> Finding:
    """Compare the installed libraries with the ranges of pyproject.toml, with the extras that these settings need."""
    package = _metadata()
    if package is None:
        return warning("libraries", "not compared: no package metadata", "`make setup`, or pip install")
    needed = extras_needed(settings) if settings else ()
    further = extras_of_services(settings) if settings else {}
    return libraries_finding(package.get_all("Requires-Dist") or [], needed, further)


def libraries_finding(requirements: Sequence[str], needed: Sequence[str], further: Mapping[str, str]) -> Finding:
    """Return the finding about the package's requirements.

    Args:
        needed: the extras without which nothing starts.
        further: other extras, each with the services that need it; without them there is a warning.
    """
    unmet = unmet_requirements(requirements, needed)
    missing = {
        extra: services
        for extra, services in further.items()
        if set(unmet_requirements(requirements, [extra])) - set(unmet)
    }
    extras = [*needed, *missing]
    names = f"{PACKAGE}[{','.join(extras)}]" if extras else PACKAGE
    advice = f"`make setup`, or pip install --upgrade '{names}'"
    if unmet:
        return problem("libraries", "; ".join(unmet), advice)
    if missing:
        lines = unmet_requirements(requirements, extras)
        return warning("libraries", f"{'; '.join(lines)}: no {', no '.join(missing.values())} can start", advice)
    return ok("libraries", f"all {len(requirements)} requirements looked at")


def bytecode(library: str = "torch") -> Finding:
    """Check that a library is compiled once, and not at every start: for ours that makes seconds."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        return ok("bytecode", f"{library} has no source")
    kept = Path(cache_from_source(spec.origin))
    if kept.exists():
        return ok("bytecode", f"{library} is compiled")
    if not sys.dont_write_bytecode and may_write(existing_ancestor(kept.parent)):
        return ok("bytecode", "the first start keeps it for later ones")
    reason = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{kept.parent} cannot be written"
    advice = f"`{sys.executable} -m compileall -q {Path(spec.origin).parents[1]}`, or set PYTHONPYCACHEPREFIX"
    return warning("bytecode", f"every start compiles its libraries, which takes seconds: {reason}", advice)


def missing_libraries() -> list[str]:
    """Return the missing libraries, without which no other check can run."""
    package = _metadata()
    requirements = package.get_all("Requires-Dist") if package else None
    return [line for line in unmet_requirements(requirements or [], ()) if " is missing, " in line]


def extras_needed(settings: Settings) -> tuple[str, ...]:
    """Return the extras of the package that whatever runs with these settings needs."""
    registry = settings.registry
    needs = {
        "kafka": settings.log.path is None,
        "llamacpp": settings.models.engine == "llamacpp",
        "mlflow": registry.is_in_mlflow and registry.exists,
        "otel": settings.tracing.endpoint is not None,
        "postgres": _is_in_postgresql(settings),
    }
    return tuple(name for name, is_needed in needs.items() if is_needed)


def extras_of_services(settings: Settings) -> dict[str, str]:
    """Return the extras that only some services need with these settings, each with the services."""
    registry = settings.registry
    needs = {
        "serve": ("worker", True),
        "mlflow": ("distiller, no controller", registry.is_in_mlflow and not registry.exists),
        "ray": ("distiller of these targets", distiller_needs_ray(settings)),
    }
    return {extra: services for extra, (services, is_needed) in needs.items() if is_needed}


def _is_in_postgresql(settings: Settings) -> bool:
    """Return whether the key store or the registry is a database that needs the extra."""
    urls = (settings.log.key_store_url or "", settings.registry.url)
    return any(driver_of(url) in MODULES["postgres"] for url in urls)


def unmet_requirements(requirements: Iterable[str], extras: Iterable[str]) -> list[str]:
    """Return a line for every requirement that is not met; those of other extras are skipped."""
    from packaging.requirements import Requirement

    unmet = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        installed = _version(requirement.name)
        if installed is None:
            unmet.append(f"{requirement.name} is missing, wanted {requirement.specifier}")
        elif not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(f"{requirement.name} is {installed}, wanted {requirement.specifier}")
    return unmet


def _metadata() -> metadata.PackageMetadata | None:
    try:
        return metadata.metadata(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
