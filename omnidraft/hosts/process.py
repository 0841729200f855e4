"""Code shared by all service processes: the command line, logging, signals, and exit codes.

`python -m services.X` uses `run`, `omnidraft run X` uses `serve_and_exit`. Nothing here depends on a particular
service.
"""

import atexit
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from omnidraft import config, extras
from omnidraft.errors import ConfigError, OmnidraftError
from omnidraft.progress import stages
from omnidraft.system import collect_in_huge_pages

HostMain = Callable[["config.Settings"], int]

EXIT_REFUSED = 2
"""The exit code of a service that cannot run with its settings, models, log or registry."""

EXIT_S = 5.0
"""The time that exit handlers have after a service has stopped."""

SAME_REQUEST_S = 1.0
"""Signals that come within this time ask for the same stop: one sent to a whole process group reaches a service
directly, and again from the process that supervises it (child.run_supervised)."""

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""The time format of JSON lines, in UTC."""
FORMAT_VARIABLE = "OMNIDRAFT_LOG_FORMAT"
"""`text`, for people, or `json`: one object per line with time, level, logger, message and role."""

_CLIENT_LOG_LEVELS = {
    "kafka": logging.CRITICAL,
    "opentelemetry": logging.CRITICAL,
    "urllib3": logging.ERROR,
    "httpx": logging.WARNING,
    "alembic": logging.WARNING,
}
"""The log level of client libraries. Their failures reach us as exceptions, which we log once per outage instead of
forty times a second."""

logger = logging.getLogger(__name__)


def run(name: str, host_main: HostMain) -> None:
    """Parse the command line, run the service `name` until it stops, and exit with its code."""

    def command(
        config_path: Annotated[
            Path | None, typer.Option("--config", help="TOML file; without it the defaults apply.")
        ] = None,
    ) -> None:
        serve_and_exit(name, host_main, config_path)

    command.__doc__ = f"Run the omnidraft {name} until SIGTERM."
    faulthandler.enable()
    typer.run(command)


def serve_and_exit(name: str, host_main: HostMain, config_path: Path | None, **overrides: Any) -> NoReturn:
    """Do what `serve` does, then end this process with the exit code, once its exit handlers ran or EXIT_S is over.

    Nothing else is waited for: no other thread, no garbage, no destructors of native libraries, which may take minutes
    or forever while others use the processors.
    """
    code = serve(name, host_main, config_path, **overrides)
    deadline = threading.Timer(EXIT_S, os._exit, [code])
    deadline.daemon = True
    deadline.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by its reader, or by us
            stream.flush()
    os._exit(code)


def serve(name: str, host_main: HostMain, config_path: Path | None, **overrides: Any) -> int:
    """Run the service `name` until it stops; return its exit code. A refusal is one line on stderr, no traceback.

    Args:
        overrides: settings (section=dict) that win over file and environment; see config.load.
    """
    try:
        configure_logging(name)
        settings = config.load(config_path, **overrides)
        logger.info("%s starting: log %s, registry %s", name, settings.log.url, config.masked(settings.registry.url))
        return host_main(settings)
    except OmnidraftError as exc:
        _print_refusal(name, exc)
        return EXIT_REFUSED


def configure_logging(role: str) -> None:
    """Log to stderr in the format of OMNIDRAFT_LOG_FORMAT, with the log levels of client libraries raised.

    Args:
        role: the service that this process runs.

    Raises:
        ConfigError: OMNIDRAFT_LOG_FORMAT is neither `text` nor `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(role))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(_is_json())
    _set_client_log_levels()


def configure_command_logging(name: str) -> None:
    """Log to stderr for an interactive command: warnings, the slow steps of loading models, and on a terminal each
    stage of a start."""
    logging.basicConfig(level=logging.WARNING, format=f"{name}: %(message)s", stream=sys.stderr)
    _set_client_log_levels()
    logging.getLogger("omnidraft.models").setLevel(logging.INFO)
    if sys.stderr.isatty():
        stages.setLevel(logging.INFO)


def _set_client_log_levels() -> None:
    for name, level in _CLIENT_LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)


def formatter(role: str) -> logging.Formatter:
    """Return the formatter that OMNIDRAFT_LOG_FORMAT names. Raises ConfigError."""
    if not _is_json():
        return logging.Formatter(TEXT_FORMAT)
    from pythonjsonlogger.json import JsonFormatter

    names = {"asctime": "time", "levelname": "level", "name": "logger", "message": "message"}
    json_formatter = JsonFormatter(tuple(names), rename_fields=names, static_fields={"role": role}, datefmt=TIME_FORMAT)
    json_formatter.converter = time.gmtime
    return json_formatter


def _is_json() -> bool:
    """Return whether OMNIDRAFT_LOG_FORMAT is `json`. Raises ConfigError for an unknown format."""
    log_format = os.environ.get(FORMAT_VARIABLE, "text")
    if log_format not in ("text", "json"):
        raise ConfigError(f"{FORMAT_VARIABLE} must be text or json, got {log_format!r}")
    return log_format == "json"


def _print_refusal(name: str, exc: OmnidraftError) -> None:
    """Print the error as one line, or log it as JSON when that is the log format."""
    if os.environ.get(FORMAT_VARIABLE) == "json":
        logger.error("omnidraft %s: %s", name, exc)
    else:
        print(f"omnidraft {name}: {exc}", file=sys.stderr)


def run_worker(settings: "config.Settings") -> int:
    """Run a decoding worker until SIGTERM; return its exit code.

    Raises:
        OmnidraftError: models, log or registry cannot be used, or the address cannot be listened on.
    """
    extras.require("serve", "a worker")
    pause_garbage_collection()
    stages.info("loading libraries")
    from omnidraft.hosts import worker  # imports torch, after wrong settings have been reported

    return worker.main(settings)


def pause_garbage_collection() -> None:
    """Collect no garbage until `freeze_loaded_objects`. Call it before anything large is imported.

    While a worker imports and loads, nearly everything stays, and traversing it again and again takes a second.
    """
    gc.disable()


def freeze_loaded_objects() -> None:
    """Exclude all present objects from garbage collection, and collect what comes; keep them in huge pages. Call it
    once everything that stays is loaded.

    Traversing the modules and models of a worker takes a quarter of a second, in which no token is emitted.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    collect_in_huge_pages()


def end_at_once_on_interrupt(doing: str) -> None:
    """End this process on SIGINT without waiting for its threads, until `stop_on_signals`. Call it from the main
    thread."""

    def on_interrupt(_number: int, _frame: object) -> None:
        logger.warning("interrupted while %s", doing)
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, on_interrupt)


def stop_on_signals(stop: threading.Event | None = None) -> threading.Event:
    """Return the event that SIGTERM or SIGINT sets, a new one if none is given; the same signal kills the process
    when it comes again later than SAME_REQUEST_S.

    Call it from the main thread, and after `ray.init`, which installs a SIGTERM handler of its own.
    """
    stop = stop or threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        logger.info("stopping on %s", signal.Signals(number).name)
        stop.set()
        signal.signal(number, partial(_on_repeated_signal, time.monotonic()))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


def _on_repeated_signal(first_s: float, number: int, _frame: object) -> None:
    if time.monotonic() - first_s > SAME_REQUEST_S:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def entry(name: str, command: Callable[..., None]) -> None:
    """Run one typer command as a program of its own; a refusal is one line on stderr and exit code 2."""
    faulthandler.enable()
    configure_command_logging(name)
    try:
        typer.run(command)
    except OmnidraftError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
