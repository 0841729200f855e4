"""The controller's entry point; what it does is in omnidraft/hosts/controller.py."""

from omnidraft.config import Settings
from omnidraft.hosts import process


def main() -> None:
    """Parse the command line and run until SIGTERM."""
    process.run("controller", _host)


def _host(settings: Settings) -> int:
    from omnidraft.hosts import controller  # imports torch, after wrong settings have been reported

    return controller.main(settings)
