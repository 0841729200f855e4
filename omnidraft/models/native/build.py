"""Compile our kernels once for each instruction set; every later process finds the libraries in the user's cache. Those
of a wheel are in wheel_libraries.py.

The libraries share torch's OpenMP threads: torch has loaded a libgomp.so.1 already, and no second one is loaded.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from omnidraft.errors import KernelsUnavailable
from omnidraft.files import replaced_file
from omnidraft.private_files import PRIVATE_FOLDER, make_folder, require_unshared_file, require_unshared_folder

SOURCE = Path(__file__).parent / "kernels" / "kernels.cpp"
"""The main file; it includes the headers beside it."""
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
"""Without contraction the bits of a result do not depend on the instruction set."""
_AVX512 = ("-march=x86-64-v4", "-mavx512vnni")
_X86 = {
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-march=x86-64-v3",),
}
_GENERIC: dict[str, tuple[str, ...]] = {"generic": ()}
ARM = {"neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm",), "neon": ("-march=armv8.2-a+dotprod",), **_GENERIC}
VARIANTS: dict[str, tuple[str, ...]] = {"x86_64": _X86, "AMD64": _X86, "aarch64": ARM, "arm64": ARM}.get(
    platform.machine(), _GENERIC
)
"""Instruction sets that the kernels are compiled for, with the compiler's flags; usually the fastest comes first. None
asks the compiler what this processor can do, so a library that was built elsewhere serves here too."""
_NEEDED = {
    "amx": {"amx_tile", "amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon_i8mm": {"asimddp", "i8mm"},
    "neon": {"asimddp"},
}
"""Flags of CPUINFO without which a variant is not tried."""
CPUINFO = Path("/proc/cpuinfo")
"""Where Linux says what the processor can do; other systems have no such file."""
_ADVICE = "install a C++ compiler with OpenMP (Debian and Ubuntu: apt-get install g++), or name one in CXX"

logger = logging.getLogger(__name__)


def is_announced(variant: str) -> bool:
    """Return whether the processor claims the instructions of this variant, or makes no claims."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    named = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    flags = next((set(names.split()) for names in named), None)
    return flags is None or _NEEDED.get(variant, set()) <= flags


def compiled(source: Path, folder: Path, flags: Sequence[str] = ()) -> Path:
    """Return the library of this source for this compiler; one that is missing, or that somebody else could have
    written, is compiled into `folder`.

    Args:
        flags: the compiler's flags for the instruction set.

    Raises:
        KernelsUnavailable: there is no compiler, it refuses the source, or others may write to the folder.
    """
    from filelock import FileLock

    compiler = find_compiler()
    library = folder / f"{source.stem}-{_fingerprint(source, compiler, flags)}.so"
    try:
        make_folder(folder)
        require_unshared_folder(folder)
        if is_usable(library):
            return library
        with FileLock(library.with_suffix(".lock")):
            if not is_usable(library):
                compile_library(source, library, compiler, flags)
    except OSError as exc:
        raise KernelsUnavailable(f"{folder} cannot be used: {exc}; give OMNIDRAFT_HOME a place that can") from exc
    return library


def is_usable(library: Path) -> bool:
    """Return whether this library is there, not emptied by a power failure, and nobody else could have written it."""
    try:
        status = library.stat()
        require_unshared_file(library, status)
    except FileNotFoundError:
        return False
    except PermissionError as exc:
        logger.warning("compiling %s anew: %s", library.name, exc)
        return False
    return status.st_size > 0


def find_compiler() -> str:
    """Return the C++ compiler that CXX names, else g++ or c++. Raises KernelsUnavailable without one."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    compiler = next((path for path in map(shutil.which, names) if path), None)
    if compiler is None:
        raise KernelsUnavailable(f"there is no {' or '.join(names)}; {_ADVICE}")
    return compiler


def compile_library(source: Path, library: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compile a library aside, then give it its name, once its bytes are on the disk. Raises KernelsUnavailable when
    the compiler refuses."""
    logger.info("compiling %s with %s, once", source.name, " ".join(flags) or "no flags")
    started = time.perf_counter()
    with replaced_file(library, PRIVATE_FOLDER) as file:
        _run([compiler, *FLAGS, *flags, "-o", file.name, str(source)])
        os.chmod(file.name, PRIVATE_FOLDER)  # whatever the compiler made of them
    logger.info("compiled %s in %.1f s", library, time.perf_counter() - started)


def _fingerprint(source: Path, compiler: str, flags: Sequence[str]) -> str:
    parts = [source_digest(source), *FLAGS, *flags, _run([compiler, "--version"])]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def source_digest(source: Path = SOURCE) -> str:
    """Return a digest of the source and the headers beside it."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    return hashlib.sha256("\n".join(file.read_text(encoding="utf-8") for file in files).encode()).hexdigest()


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as exc:
        raise KernelsUnavailable(f"{command[0]} does not run: {exc}; {_ADVICE}") from exc
    except subprocess.CalledProcessError as exc:
        raise KernelsUnavailable(f"{' '.join(command)} failed: {exc.stderr.strip()[-500:]}; {_ADVICE}") from exc
