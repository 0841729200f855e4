"""Compiles our kernels into the wheel, for every instruction set, so that an installation needs no compiler.

Without a compiler the wheel has none, and they are compiled at first use; OMNIDRAFT_REQUIRE_COMPILER=1 makes that an
error. A checkout that is installed with `--editable` compiles at first use, too.
"""

import os
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GLIBC_VERSION = re.compile(rb"GLIBC_2\.(\d+)")
"""The versions of its symbols that a library asks for, as they stand in its string table."""


class KernelsHook(BuildHookInterface):
    """Adds the libraries to the wheel, and the tag of the systems on which they load."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless this is an editable installation."""
        if version == "editable" or platform.system() != "Linux":
            return
        sys.path.insert(0, self.root)
        from omnidraft.errors import KernelsUnavailable
        from omnidraft.models.native import build

        self._folder = tempfile.TemporaryDirectory(prefix="omnidraft-kernels-")
        try:
            libraries = [build.compile_for_wheel(variant, Path(self._folder.name)) for variant in build.VARIANTS]
        except KernelsUnavailable as exc:
            if os.environ.get("OMNIDRAFT_REQUIRE_COMPILER"):
                raise
            self.app.display_warning(f"this wheel has no compiled kernels: {exc}")
            return
        package = build.WHEEL_LIBRARIES.relative_to(self.root)
        build_data["force_include"] |= {str(library): str(package / library.name) for library in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def platform_tag(libraries: list[Path]) -> str:
    """Return the tag of the oldest glibc that has every symbol which the libraries ask for.

    What else they need, libgomp.so.1, is no part of manylinux: torch, without which nothing here runs, brings it.
    """
    minors = [int(minor) for library in libraries for minor in GLIBC_VERSION.findall(library.read_bytes())]
    system = f"manylinux_2_{max(minors)}" if minors else "linux"
    return f"{system}_{platform.machine()}"
