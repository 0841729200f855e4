"""Homes for caches, apart from the user's; compiled kernels and what was tried on this processor are shared."""

from pathlib import Path

from omnidraft.system import default_home

_OF_THIS_MACHINE = ("native", "probes")


def make_home(folder: Path) -> Path:
    """The folder, made ready to be OMNIDRAFT_HOME."""
    for name in _OF_THIS_MACHINE:
        shared = default_home() / name
        shared.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(shared)
    return folder
