"""Whether this Python and these libraries are those that the package was made for. Imports none of them."""

import platform
from collections.abc import Iterable
from importlib import metadata

from omnidraft.config import Settings
from omnidraft.doctor.finding import Finding, ok, problem, warning

PACKAGE = "omnidraft"


def python() -> Finding:
    """Against `requires-python`."""
    from packaging.specifiers import SpecifierSet

    running = platform.python_version()
    if (told := _metadata()) is None:
        return warning("python", f"{running}; {PACKAGE} is not installed as a package", "`make setup`, or pip install")
    wanted = told["Requires-Python"]
    if SpecifierSet(wanted).contains(running, prereleases=True):
        return ok("python", f"{running}, wanted {wanted}")
    return problem("python", f"{running}, wanted {wanted}", "make a virtual environment with that Python")


def libraries(settings: Settings | None) -> Finding:
    """Against the ranges of pyproject.toml, with the extras that these settings need."""
    told = _metadata()
    if told is None:
        return warning("libraries", "not compared: no package metadata", "`make setup`, or pip install")
    extras = extras_needed(settings) if settings else ()
    requirements = told.get_all("Requires-Dist") or []
    unmet = unmet_requirements(requirements, extras)
    if not unmet:
        return ok("libraries", f"all {len(requirements)} requirements looked at")
    names = f"{PACKAGE}[{','.join(extras)}]" if extras else PACKAGE
    return problem("libraries", "; ".join(unmet), f"`make setup`, or pip install --upgrade '{names}'")


def missing_libraries() -> list[str]:
    """Those without which nothing more can be looked at."""
    told = _metadata()
    requirements = told.get_all("Requires-Dist") if told else None
    return [line for line in unmet_requirements(requirements or [], ()) if " is missing, " in line]


def extras_needed(settings: Settings) -> tuple[str, ...]:
    """Of the package, by these settings."""
    needs = {"kafka": settings.log.url.startswith("kafka:"), "llamacpp": settings.models.engine == "llamacpp"}
    return tuple(name for name, is_needed in needs.items() if is_needed)


def unmet_requirements(requirements: Iterable[str], extras: Iterable[str]) -> list[str]:
    """A line for every requirement that what is installed does not meet; those of other extras are passed over."""
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
