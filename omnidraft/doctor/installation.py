"""Checks of the Python version and the libraries against the package's metadata. Imports none of the libraries."""

import platform
from collections.abc import Iterable
from importlib import metadata

from omnidraft.config import Settings
from omnidraft.doctor.finding import Finding, ok, problem, warning

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
    extras = extras_needed(settings) if settings else ()
    requirements = package.get_all("Requires-Dist") or []
    unmet = unmet_requirements(requirements, extras)
    if not unmet:
        return ok("libraries", f"all {len(requirements)} requirements looked at")
    names = f"{PACKAGE}[{','.join(extras)}]" if extras else PACKAGE
    return problem("libraries", "; ".join(unmet), f"`make setup`, or pip install --upgrade '{names}'")


def missing_libraries() -> list[str]:
    """Return the missing libraries, without which no other check can run."""
    package = _metadata()
    requirements = package.get_all("Requires-Dist") if package else None
    return [line for line in unmet_requirements(requirements or [], ()) if " is missing, " in line]


def extras_needed(settings: Settings) -> tuple[str, ...]:
    """Return the extras of the package that these settings need."""
    needs = {"kafka": settings.log.url.startswith("kafka:"), "llamacpp": settings.models.engine == "llamacpp"}
    return tuple(name for name, is_needed in needs.items() if is_needed)


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
