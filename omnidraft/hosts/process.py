"""What every service process shares: its one option, its logs, its stop signal, and how it fails.

`python -m services.X` goes through `run`, `omnidraft run X` through `serve`. Nothing here knows what a service does.
"""

import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft import config
from omnidraft.errors import OmnidraftError

HostMain = Callable[[config.Settings], int]

EXIT_REFUSED = 2
"""Exit code when the service cannot run with what it was given."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

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
    typer.run(command)


def serve(name: str, host_main: HostMain, config_path: Path | None, **overrides: Any) -> int:
    """Be the service `name` until it stops; the exit code. What it refuses is one line on stderr, no traceback.

    Args:
        overrides: settings (section=dict) that come last; see config.load.
    """
    configure_logging()
    try:
        settings = config.load(config_path, **overrides)
        logger.info("%s starting: log %s", name, settings.log.url)
        return host_main(settings)
    except OmnidraftError as exc:
        print(f"omnidraft {name}: {exc}", file=sys.stderr)
        return EXIT_REFUSED


def configure_logging() -> None:
    """One line per life event on stderr; clients' own chatter from warnings on."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    for name in ("kafka", "httpx", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM or SIGINT sets, the second of which ends the process at once.

    Call it from the main thread, and after `ray.init`, which installs a SIGTERM handler of its own.
    """
    stop = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        logger.info("stopping on %s", signal.Signals(number).name)
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


def entry(name: str, command: Callable[..., None]) -> None:
    """Run one typer command as a program of its own; what it refuses is one line on stderr and exit code 2."""
    try:
        typer.run(command)
    except OmnidraftError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
