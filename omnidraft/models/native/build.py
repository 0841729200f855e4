"""Compile our kernels once for this processor; every later process finds the library in the user's cache.

The libraries share torch's OpenMP threads: torch has loaded a libgomp.so.1 already, and no second one is loaded.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

from omnidraft.errors import KernelsUnavailable
from omnidraft.models.probe.subprocess_trial import processor

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC")
VARIANTS = {"native": "-march=native"} | (
    {"x86-64-v3": "-march=x86-64-v3"} if platform.machine() in ("x86_64", "AMD64") else {}
)
"""Processors that the kernels can be compiled for, the fastest first: this one as the compiler detects it, which is not
always true in a virtual machine, and any with AVX2."""
_ADVICE = "install a C++ compiler with OpenMP (Debian and Ubuntu: apt-get install g++), or name one in CXX"

logger = logging.getLogger(__name__)


def compiled(source: Path, folder: Path, march: str = VARIANTS["native"]) -> Path:
    """Return the library of this source for this compiler and processor; a missing one is compiled into `folder`.

    Args:
        march: the compiler's flag for the instruction set.

    Raises:
        KernelsUnavailable: there is no compiler, or it refuses the source.
    """
    from filelock import FileLock

    compiler = _compiler()
    library = folder / f"{source.stem}-{_fingerprint(source, compiler, march)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(source, library, compiler, march)
    except OSError as exc:
        raise KernelsUnavailable(f"{folder} cannot be written: {exc}; give OMNIDRAFT_HOME a place that can") from exc
    return library


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    compiler = next((path for path in map(shutil.which, names) if path), None)
    if compiler is None:
        raise KernelsUnavailable(f"there is no {' or '.join(names)}; {_ADVICE}")
    return compiler


def _compile(source: Path, library: Path, compiler: str, march: str) -> None:
    logger.info("compiling %s with %s, once", source.name, march)
    partial, started = library.with_suffix(".partial"), time.perf_counter()
    _run([compiler, *FLAGS, march, "-o", str(partial), str(source)])
    partial.rename(library)
    logger.info("compiled %s in %.1f s", library, time.perf_counter() - started)


def _fingerprint(source: Path, compiler: str, march: str) -> str:
    parts = [source.read_text(encoding="utf-8"), *FLAGS, march, _run([compiler, "--version"]), processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as exc:
        raise KernelsUnavailable(f"{command[0]} does not run: {exc}; {_ADVICE}") from exc
    except subprocess.CalledProcessError as exc:
        raise KernelsUnavailable(f"{' '.join(command)} failed: {exc.stderr.strip()[-500:]}; {_ADVICE}") from exc
