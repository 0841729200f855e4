"""What the operating system grants this process."""

import ctypes
import os
import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a process finds the limits of its container."""
_UNLIMITED = 2**62
"""Version 1 of control groups gives a number above this where memory has no limit."""


def usable_processors() -> int:
    """Return the number of threads that can compute at once: the processors that this process may run on, or the whole
    ones of its quota where these are fewer; at least 1."""
    count, quota = len(allowed_processors()), _processor_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def allowed_processors() -> list[int]:
    """Return the numbers of the processors that this process may run on, in order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


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


def available_memory() -> int:
    """Return the available memory of this machine in bytes, or of this container where that is less."""
    import psutil

    machines, containers = psutil.virtual_memory().available, container_memory()
    return machines if containers is None else min(machines, containers)


def container_memory() -> int | None:
    """Return the bytes of the container's memory that are free or cache files; None without a limit."""
    try:
        if (CGROUP / "memory.max").is_file():
            folder, names, cache_files = CGROUP, ("max", "current"), "inactive_file"
        else:  # version 1
            folder, names, cache_files = CGROUP / "memory", ("limit_in_bytes", "usage_in_bytes"), "total_inactive_file"
        limit, used_bytes = ((folder / f"memory.{name}").read_text().strip() for name in names)
        if limit == "max" or int(limit) > _UNLIMITED:
            return None
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - int(used_bytes) + int(facts[cache_files])
    except (OSError, ValueError, KeyError):
        return None


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""The parameters' numbers in malloc.h."""
_MAX_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees for what it allocates next, where malloc is glibc's.

    A training step makes and frees the same gigabytes as the one before. By itself malloc returns large arrays to the
    system, which clears and maps their pages anew for the next: a tenth of the time of a step, for a twentieth less
    memory. A transfer to a vocabulary of 150,000 tokens does not keep it: arrays of hundreds of megabytes leave pieces
    that no other fits into, and it needed 15.6 GB instead of 8.5.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, _MAX_INT)
        mallopt(_TOP_PAD, 64 << 20)


_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
"""Of Linux 6.1 and later."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?$")


def collect_in_huge_pages() -> None:
    """Move what this process has allocated into huge pages, where Linux can; a second for each gigabyte or two.

    A pass of a model reads all its weights, which displace page tables from the processor's caches. Of small pages the
    objects of a round have a thousand, and what happens between two passes takes a sixth more time.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for found in filter(None, map(_MAPPING.match, maps.read_text().splitlines())):
        start, end = -(-int(found[1], 16) // _HUGE_PAGE) * _HUGE_PAGE, int(found[2], 16)
        for page in range(start, end - _HUGE_PAGE + 1, _HUGE_PAGE):
            madvise(page, _HUGE_PAGE, _MADV_COLLAPSE)  # which fails where nothing is allocated


def default_home() -> Path:
    """Return `OMNIDRAFT_HOME`, or the user's cache folder."""
    return Path(os.environ.get("OMNIDRAFT_HOME") or "~/.cache/omnidraft").expanduser()
