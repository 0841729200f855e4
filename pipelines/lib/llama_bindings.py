"""Python bindings of llama.cpp in the user's cache, built as llama_build.py builds the programs, without AMX.

A process that has the folder in PYTHONPATH imports them; this environment stays without. As a program it prints the
folder.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from omnidraft.errors import ModelDownloadError
from omnidraft.system import default_home
from pipelines.lib import llama_build

OPTIONS = llama_build.OPTIONS | {
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_BUILD_COMMON": "OFF",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
}
"""cmake's options of the libraries, which find each other in one folder."""
_REQUIRED = "diskcache==5.6.3"
"""What the bindings import and this environment may lack."""


def llama_bindings(home: Path) -> Path:
    """Return the folder of llama-cpp-python below `home`; build it, with a progress bar, if it is missing.

    Raises:
        ModelError: there is no cmake, no C++ compiler, or the build failed.
        ModelDownloadError: a package cannot be downloaded.
    """
    folder = home / "llama-cpp-python" / llama_build.VERSION

    def collect(bindings: Path) -> None:
        """Put the Python files and the libraries together."""
        _install(_REQUIRED, bindings)
        package = bindings / llama_build.BINDINGS
        shutil.copytree(folder / "source" / llama_build.BINDINGS, package)
        shutil.copytree(folder / "build" / "bin", package / "lib", symlinks=True, dirs_exist_ok=True)

    return llama_build.built(folder, "site", ("llama",), OPTIONS, collect)


def _install(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--target", str(folder), requirement], capture_output=True, text=True)
    if done.returncode != 0:
        raise ModelDownloadError(f"{requirement}: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    print(llama_bindings(default_home()))
