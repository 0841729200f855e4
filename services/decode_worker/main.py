"""The decode worker's entry point; what it does is in omnidraft/hosts/worker.py."""

from omnidraft.config import Settings
from omnidraft.hosts import process


def main() -> None:
    """Parse the command line and run until SIGTERM."""
    process.run("worker", _host)


def _host(settings: Settings) -> int:
    process.pause_garbage_collection()
    from omnidraft.hosts import worker  # imports torch, after wrong settings have been reported

    return worker.main(settings)
