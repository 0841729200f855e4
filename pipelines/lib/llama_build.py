"""llama.cpp's own server and quantizer, built once from the source that llama-cpp-python ships.

Order of effects, so that an interrupted build resumes:
1. the source package is downloaded, the source unpacked aside and renamed into place;
2. cmake builds, which goes on where it stopped;
3. what is wanted of it is copied aside and renamed into place, and source and build folder are deleted.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from omnidraft.errors import ModelDownloadError, ModelError
from omnidraft.progress import bar
from omnidraft.system import usable_processors

VERSION = "0.3.36"
"""The version of llama-cpp-python; its source package has the whole of llama.cpp."""
PROGRAMS = ("llama-server", "llama-quantize")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
"""cmake's options for the programs: this processor (GGML_NATIVE is on by itself), no web pages, no network."""
_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
"""llama.cpp's AMX code ends with a segmentation fault on processors where AMX itself works. Its AVX512 stays."""
COMPILERS = ("c++", "g++", "clang++")
_SOURCE = Path("vendor", "llama.cpp")
"""The folder of llama.cpp in the source package."""
BINDINGS = Path("llama_cpp")
"""The folder of the bindings there."""
_PERCENT = re.compile(r"\[ *(\d+)%\]")
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class LlamaPrograms:
    """The programs of one build."""

    folder: Path

    @property
    def server(self) -> Path:
        return self.folder / "llama-server"

    @property
    def quantize(self) -> Path:
        return self.folder / "llama-quantize"


def llama_programs(home: Path) -> LlamaPrograms:
    """Return the programs below `home`; build them, with a progress bar, if they are missing. Raises as `built`."""
    folder = home / "llama-server" / VERSION

    def collect(programs: Path) -> None:
        for name in PROGRAMS:
            shutil.copy2(folder / "build" / "bin" / name, programs / name)

    return LlamaPrograms(built(folder, "bin", PROGRAMS, OPTIONS, collect))


def built(
    folder: Path, name: str, targets: Sequence[str], options: Mapping[str, str], collect: Callable[[Path], None]
) -> Path:
    """Return the folder of this name in `folder`; build the targets and make it, if it is missing.

    Args:
        collect: puts into a new folder what was built in `folder`/build.

    Raises:
        ModelError: there is no cmake, no C++ compiler, or the build failed.
        ModelDownloadError: a package cannot be downloaded.
    """
    made, partial = folder / name, folder / f"{name}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not made.exists():
            _unpack(folder)
            build(folder, targets, options)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            collect(partial)
            partial.rename(made)
            for each in ("source", "build"):
                shutil.rmtree(folder / each)
    return made


def _require_tools() -> None:
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    if not any(map(shutil.which, compilers)):
        raise ModelError(
            f"llama.cpp is built from source, and there is no C++ compiler ({', '.join(compilers)}); "
            "install one (Debian: apt-get install g++), or measure other --systems"
        )
    for tool in ("cmake", "make"):
        if shutil.which(tool) is None:
            raise ModelError(
                f"llama.cpp is built from source, and there is no {tool}; install it "
                f"(Debian: apt-get install {tool}), or measure other --systems"
            )


def _unpack(folder: Path) -> None:
    """Put llama.cpp and its bindings into `folder`/source, unless they are there. Raises as `built`."""
    _require_tools()
    if (folder / "source").exists():
        return
    package = _download(folder / "download")
    partial = folder / "source.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(package) as archive:
        archive.extractall(partial, members=_members(archive), filter="data")
    if not (partial / _SOURCE / "tools" / "server").is_dir():
        raise ModelError(f"{package.name} has no llama.cpp with tools/server")
    partial.rename(folder / "source")
    shutil.rmtree(package.parent)


def _download(folder: Path) -> Path:
    """Download the source package with pip, which also reads what it would need to be built."""
    requirement = f"llama-cpp-python=={VERSION}"
    print(f"downloading the source of {requirement} (77 MB)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    packages = list(folder.glob("*.tar.gz"))
    if done.returncode != 0 or not packages:
        raise ModelDownloadError(f"{requirement}: {_end_of(done.stderr.splitlines()) or 'pip left no source package'}")
    return packages[0]


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the files of llama.cpp and the bindings, their paths without the package's own folder."""
    for member in archive:
        path = Path(*Path(member.name).parts[1:])
        if path.is_relative_to(_SOURCE) or path.is_relative_to(BINDINGS):
            yield member.replace(name=str(path), deep=False)


def build(folder: Path, targets: Sequence[str], options: Mapping[str, str]) -> None:
    """Build what is in `folder`/source in `folder`/build, where an interrupted build goes on. Raises ModelError."""
    made = str(folder / "build")
    log_path = folder / "build.log"
    flags = {name: _WITHOUT_AMX for name in ("CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS") if platform.machine() == "x86_64"}
    definitions = [f"-D{name}={value}" for name, value in {**options, **flags}.items()]
    with log_path.open("w") as log:
        configure = ["cmake", "-G", "Unix Makefiles", "-S", str(folder / "source" / _SOURCE), "-B", made, *definitions]
        if subprocess.run(configure, stdout=log, stderr=subprocess.STDOUT).returncode != 0:
            raise ModelError(_failure(log_path))
    jobs = str(usable_processors())
    _run_make(["cmake", "--build", made, "--parallel", jobs, "--target", *targets], log_path)


def _run_make(command: Sequence[str], log_path: Path) -> None:
    """Run the build and show how far it is. Raises ModelError."""
    with (
        log_path.open("a") as log,
        bar("building llama.cpp", 100) as advance,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as make,
    ):
        assert make.stdout is not None
        shown = 0
        for line in make.stdout:
            log.write(line)
            if (percent := _PERCENT.match(line)) and int(percent[1]) > shown:
                advance(int(percent[1]) - shown)
                shown = int(percent[1])
    if make.returncode != 0:
        raise ModelError(_failure(log_path))


def _failure(log_path: Path) -> str:
    return f"building llama.cpp failed; see {log_path}:\n{_end_of(log_path.read_text().splitlines())}"


def _end_of(lines: Sequence[str]) -> str:
    return "\n".join(lines[-_LAST_LINES:])
