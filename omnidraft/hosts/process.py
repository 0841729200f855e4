"""What every service process shares: its one option, its logs, its stop signal, and how it fails.

`python -m services.X` goes through `run`, `omnidraft run X` through `serve`. Nothing here knows what a service does.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft import config
from omnidraft.errors import ConfigError, OmnidraftError

HostMain = Callable[[config.Settings], int]

EXIT_REFUSED = 2
"""Exit code when the service cannot run with what it was given."""

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Of JSON lines: UTC."""
FORMAT_VARIABLE = "OMNIDRAFT_LOG_FORMAT"
"""`text`, for people, or `json`: an object a line with time, level, logger, message and role."""

_CHATTER = {
    "kafka": logging.CRITICAL,
    "opentelemetry": logging.CRITICAL,
    "urllib3": logging.ERROR,
    "httpx": logging.WARNING,
    "alembic": logging.WARNING,
}
"""From which level on clients may speak. What fails in them reaches us as errors, which we log once an outage and not
forty times a second."""

logger = logging.getLogger(__name__)


def run(name: str, host_main: HostMain) -> None:
    """Parse the command line, be the service `name` until it stops, and exit with its code."""

    def command(
        config_path: Annotated[
            Path | None, typer.Option("--config", help="TOML file; without it the defaults hold.")
        ] = None,
    ) -> None:
        raise typer.Exit(serve(name, host_main, config_path))

    command.__doc__ = f"Run the omnidraft {name} until SIGTERM."
    faulthandler.enable()
    typer.run(command)


def serve(name: str, host_main: HostMain, config_path: Path | None, **overrides: Any) -> int:
    """Be the service `name` until it stops; the exit code. What it refuses is one line on stderr, no traceback.

    Args:
        overrides: settings (section=dict) that come last; see config.load.
    """
    try:
        configure_logging(name)
        settings = config.load(config_path, **overrides)
        logger.info("%s starting: log %s, registry %s", name, settings.log.url, config.masked(settings.registry.url))
        return host_main(settings)
    except OmnidraftError as exc:
        _tell_refusal(name, exc)
        return EXIT_REFUSED


def configure_logging(role: str) -> None:
    """One line per life event on stderr, as OMNIDRAFT_LOG_FORMAT says; clients' own chatter from warnings on.

    Args:
        role: which service this process is.

    Raises:
        ConfigError: OMNIDRAFT_LOG_FORMAT is neither `text` nor `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(role))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(_is_json())
    for name, level in _CHATTER.items():
        logging.getLogger(name).setLevel(level)


def configure_command_logging(name: str) -> None:
    """For a command that people watch: warnings, and what takes its time before anything can be computed."""
    logging.basicConfig(level=logging.WARNING, format=f"{name}: %(message)s", stream=sys.stderr)
    logging.getLogger("omnidraft.models").setLevel(logging.INFO)


def formatter(role: str) -> logging.Formatter:
    """Of log lines, as OMNIDRAFT_LOG_FORMAT says. Raises ConfigError."""
    if not _is_json():
        return logging.Formatter(TEXT_FORMAT)
    from pythonjsonlogger.json import JsonFormatter

    names = {"asctime": "time", "levelname": "level", "name": "logger", "message": "message"}
    made = JsonFormatter(tuple(names), rename_fields=names, static_fields={"role": role}, datefmt=TIME_FORMAT)
    made.converter = time.gmtime
    return made


def _is_json() -> bool:
    """Raises ConfigError."""
    chosen = os.environ.get(FORMAT_VARIABLE, "text")
    if chosen not in ("text", "json"):
        raise ConfigError(f"{FORMAT_VARIABLE} must be text or json, got {chosen!r}")
    return chosen == "json"


def _tell_refusal(name: str, exc: OmnidraftError) -> None:
    """As a line for people, unless whoever reads stderr was promised JSON."""
    if os.environ.get(FORMAT_VARIABLE) == "json":
        logger.error("omnidraft %s: %s", name, exc)
    else:
        print(f"omnidraft {name}: {exc}", file=sys.stderr)


def freeze_loaded_objects() -> None:
    """Called once all that stays is loaded: full garbage collections skip it from now on.

    Walking the modules and models of a worker takes a quarter of a second, in which no token comes.
    """
    gc.collect()
    gc.freeze()


def stop_on_signals(stop: threading.Event | None = None) -> threading.Event:
    """Return the event that SIGTERM or SIGINT sets, a new one if none is given; a second signal kills the process.

    Call it from the main thread, and after `ray.init`, which installs a SIGTERM handler of its own.
    """
    stop = stop or threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        logger.info("stopping on %s", signal.Signals(number).name)
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


def entry(name: str, command: Callable[..., None]) -> None:
    """Run one typer command as a program of its own; what it refuses is one line on stderr and exit code 2."""
    faulthandler.enable()
    configure_command_logging(name)
    try:
        typer.run(command)
    except OmnidraftError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
