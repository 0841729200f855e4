"""The distiller's entry point; what it does is in omnidraft/hosts/distiller.py."""

from omnidraft.config import Settings
from omnidraft.hosts import process
from omnidraft.throttle import NICENESS, start_session


def main() -> None:
    """Parse the command line and run until SIGTERM."""
    process.run("distiller", _host)


def _host(settings: Settings) -> int:
    from omnidraft.hosts import distiller  # imports torch, after wrong settings have been reported

    start_session(NICENESS)
    return distiller.main(settings)
