"""Compiles our kernels into the wheel, for every instruction set, so that an installation needs no compiler.

Without a compiler the wheel has none, and they are compiled at first use; OMNIDRAFT_REQUIRE_COMPILER=1 makes that an
error. A checkout that is installed with `--editable` compiles at first use, too.
"""

import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Adds the libraries to the wheel, and the tag of the systems on which they load."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless this is an editable installation."""
        if version == "editable" or platform.system() != "Linux":
            return
        sys.path.insert(0, self.root)
        from omnidraft.errors import KernelsUnavailable
        from omnidraft.models.native import wheel_libraries

        self._folder = tempfile.TemporaryDirectory(prefix="omnidraft-kernels-")
        try:
            libraries = wheel_libraries.compile_for_wheel(Path(self._folder.name))
        except KernelsUnavailable as exc:
            if os.environ.get("OMNIDRAFT_REQUIRE_COMPILER"):
                raise
            self.app.display_warning(f"this wheel has no compiled kernels: {exc}")
            return
        package = wheel_libraries.FOLDER.relative_to(self.root)
        build_data["force_include"] |= {str(library): str(package / library.name) for library in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{wheel_libraries.platform_tag(libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
