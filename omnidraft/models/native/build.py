"""Compile a C++ file once for this processor; every later process finds the library in the user's cache.

Libraries share torch's OpenMP threads: torch has loaded a libgomp.so.1 before, and a second is not loaded beside it.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

from omnidraft.errors import ModelError

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_ADVICE = "install a C++ compiler with OpenMP (Debian and Ubuntu: apt-get install g++), or name one in CXX"

logger = logging.getLogger(__name__)


def compiled(source: Path, folder: Path) -> Path:
    """The library of this source for this compiler and processor, from `folder` or made there now.

    Raises:
        ModelError: there is no compiler, or it refuses the source.
    """
    from filelock import FileLock

    compiler = _compiler()
    library = folder / f"{source.stem}-{_fingerprint(source, compiler)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            _compile(source, library, compiler)
    return library


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise ModelError(f"there is no {' or '.join(names)}; {_ADVICE}")
    return found


def _compile(source: Path, library: Path, compiler: str) -> None:
    partial, started = library.with_suffix(".partial"), time.perf_counter()
    _run([compiler, *FLAGS, "-o", str(partial), str(source)])
    partial.rename(library)
    logger.info("compiled %s in %.1f s", library, time.perf_counter() - started)


def _fingerprint(source: Path, compiler: str) -> str:
    parts = [source.read_text(encoding="utf-8"), *FLAGS, _run([compiler, "--version"]), _processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _processor() -> str:
    """Everything that -march=native may look at."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return f"{platform.machine()} {platform.processor()}"
    first = described.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    return "\n".join(line for line in first if not line.lower().startswith(("cpu mhz", "bogomips", "processor")))


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as exc:
        raise ModelError(f"{command[0]} does not run: {exc}; {_ADVICE}") from exc
    except subprocess.CalledProcessError as exc:
        raise ModelError(f"{' '.join(command)} failed: {exc.stderr.strip()[-500:]}; {_ADVICE}") from exc
