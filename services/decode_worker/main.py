"""The decode worker's entry point; what it does is in omnidraft/hosts/worker.py."""

from omnidraft.config import Settings
from omnidraft.hosts import process


def main() -> None:
    """Parse the command line and run until SIGTERM."""
    process.run("worker", _host)


def _host(settings: Settings) -> int:
    from omnidraft.hosts import worker  # after the settings were read: a wrong one is reported before torch is loaded

    return worker.main(settings)
