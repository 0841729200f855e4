"""The processor time and the memory that a container is limited to: else a process sees all that its host has."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a process finds the limits of its container."""


def usable_processors() -> int:
    """Return the number of threads that can compute at once: the processors that this process may run on, or the whole
    ones of its quota where these are fewer; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _processor_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def _processor_quota() -> float | None:
    """Return the processors that the container's time amounts to, None without a limit."""
    try:
        if (CGROUP / "cpu.max").is_file():
            quota, period = (CGROUP / "cpu.max").read_text().split()
        else:  # version 1
            files = (CGROUP / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text().strip() for file in files)
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def available_memory() -> int | None:
    """Return the bytes of the container's memory that are free or cache files; None without a limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used_bytes = int((CGROUP / "memory.current").read_text())
        facts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int(limit) - used_bytes + int(facts["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
