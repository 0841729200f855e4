"""The machine and the command line of a report: figures mean nothing without them."""

import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from omnidraft.system import usable_processors


def command(module: str) -> str:
    """Return the command line of this process, which runs this module, quoted for a shell."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def made_by(module: str) -> dict[str, Any]:
    """Return the command line of this process, which runs this module, and the machine, as fields of a report."""
    return {"command": command(module), "machine": describe()}


def describe() -> dict[str, str | int | float]:
    """Return processor, usable cores, memory, accelerator, versions and the commit of this checkout."""
    return {
        "processor": _processor(),
        "cores": usable_processors(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit, with a plus after it when tracked files were changed since."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
