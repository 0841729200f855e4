"""The parts of an installation that pip adds by name, `pip install 'omnidraft[kafka]'`, and what to do without one."""

import os
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from omnidraft.errors import ExtraMissing

if TYPE_CHECKING:
    from omnidraft.config import Settings

MODULES = {
    "serve": ("fastapi", "uvicorn"),
    "ray": ("ray",),
    "mlflow": ("mlflow",),
    "kafka": ("kafka",),
    "postgres": ("psycopg",),
    "otel": ("opentelemetry.exporter.otlp.proto.http",),
    "llamacpp": ("llama_cpp",),
}
"""What is imported of each extra that this process can miss."""

DEFAULT_DRIVERS = {"postgresql": "psycopg", "mysql": "MySQLdb"}
"""Those of SQLAlchemy 2.1 for URLs that name none."""


def is_installed(extra: str) -> bool:
    """Return whether the modules of this extra are there; none is imported."""
    return all(map(_is_there, MODULES[extra]))


def require(extra: str, needed_by: str) -> None:
    """Check that an extra is installed, before its modules are imported.

    Args:
        needed_by: a setting or a command, as the beginning of the error's message.

    Raises:
        ExtraMissing: it is not; the message names the command that installs it.
    """
    if not is_installed(extra):
        raise ExtraMissing(f"{needed_by} needs an optional part of omnidraft: pip install 'omnidraft[{extra}]'")


def require_driver(url: str, needed_by: str) -> None:
    """Check that the driver of a database URL is installed, as SQLAlchemy chooses it; other URLs need none.

    Raises:
        ExtraMissing: it is not.
    """
    driver = driver_of(url)
    if driver in MODULES["postgres"]:
        require("postgres", needed_by)
    elif driver is not None and not _is_there(driver):
        raise ExtraMissing(f"{needed_by} needs the Python package {driver}, which is not installed")


def driver_of(url: str) -> str | None:
    """Return the module by which SQLAlchemy speaks to the database of a URL; None where it needs none."""
    kind, _, named = url.partition("://")[0].partition("+")
    return (named or DEFAULT_DRIVERS[kind]) if kind in DEFAULT_DRIVERS else None


def distiller_needs_ray(settings: "Settings") -> bool:
    """Return whether learning takes Ray, by `learner.host`."""
    host = settings.learner.host
    return host == "ray" or (host == "auto" and (len(settings.models.targets) > 1 or "RAY_ADDRESS" in os.environ))


def _is_there(module: str) -> bool:
    with suppress(ModuleNotFoundError):  # of a package above it
        return find_spec(module) is not None
    return False
