"""The distiller's entry point; what it does is in omnidraft/hosts/distiller.py."""

import os

from omnidraft.config import Settings
from omnidraft.hosts import process
from omnidraft.throttle import start_session


def main() -> None:
    """Parse the command line and run until SIGTERM."""
    process.run("distiller", _host)


def _host(settings: Settings) -> int:
    from omnidraft.hosts import distiller  # imports torch, after wrong settings have been reported

    if os.getsid(0) == os.getpid():  # a program started it: in a session of its own a terminal could not interrupt it
        start_session()
    return distiller.main(settings)
