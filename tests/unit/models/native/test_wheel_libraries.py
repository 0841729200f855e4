"""An installation from a wheel has its kernels without a compiler, as long as they are those of its source."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import omnidraft
from omnidraft.models.native.wheel_libraries import FOLDER, platform_tag
from omnidraft.models.probe.choice import kernels

pytestmark = pytest.mark.long

PACKAGE = Path(omnidraft.__file__).parent
INSTALL = """
import shutil, sys
from pathlib import Path
from omnidraft.models.native import wheel_libraries
wheel_libraries.FOLDER.mkdir()
shutil.copy(sys.argv[2], wheel_libraries.FOLDER / wheel_libraries.library_name(sys.argv[1]))
"""
USE = """
import sys
from omnidraft.errors import KernelsUnavailable
from omnidraft.models.probe.choice import kernels
try:
    print(kernels(sys.argv[1]).library)
except KernelsUnavailable as exc:
    print(exc)
"""


@pytest.fixture
def installed(tmp_path):
    """A copy of the package, with what the tests' kernels were compiled to as a wheel would carry it."""
    made = kernels("portable")
    shutil.copytree(PACKAGE, tmp_path / "omnidraft", ignore=shutil.ignore_patterns("__pycache__", "*.avro"))
    run(tmp_path, INSTALL, made.variant, made.library)
    return tmp_path, made.variant


def run(site: Path, code: str, *arguments) -> str:
    environ = os.environ | {"PYTHONPATH": str(site), "PATH": str(site), "OMNIDRAFT_HOME": str(site / "home")}
    environ.pop("CXX", None)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=site, env=environ, capture_output=True, text=True, check=True).stdout.strip()


def test_a_wheel_needs_no_compiler(installed):
    site, variant = installed
    assert Path(run(site, USE, variant)).is_relative_to(site / FOLDER.relative_to(PACKAGE.parent))


def test_libraries_of_another_source_are_not_used(installed):
    site, variant = installed
    with (site / "omnidraft/models/native/kernels/simd.h").open("a") as header:
        header.write("// changed")
    assert "there is no g++ or c++" in run(site, USE, variant)


def test_the_tag_is_that_of_the_newest_symbol(tmp_path):
    library = tmp_path / "some.so"
    library.write_bytes(b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.14\0GLIBC_2.9\0GOMP_4.0")
    assert platform_tag([library]) == f"manylinux_2_14_{platform.machine()}"
    library.write_bytes(b"\x7fELF\0")
    assert platform_tag([library]) == f"linux_{platform.machine()}"
