"""The decode worker's entry point; what it does is in omnidraft/hosts/worker.py."""

from omnidraft.hosts import process


def main() -> None:
    """Parse the command line and run until SIGTERM."""
    process.run("worker", process.run_worker)
