"""Prometheus and promtool: those on the path, else Debian's package, unpacked into a cache and not installed; else a
skip that says why.

OMNIDRAFT_REQUIRE_PROMETHEUS=1 turns the skip into a failure. OMNIDRAFT_TEST_CACHE names another cache.
"""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.orphans import RUN_VARIABLE

PROGRAMS = ("prometheus", "promtool")
TIMEOUT_S = 30
"""Of a command: three of them take less time than a test may."""


@dataclass(frozen=True)
class Prometheus:
    """Its programs."""

    server: Path
    promtool: Path

    def tool(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """What promtool said."""
        command = [self.promtool, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="session")
def prometheus() -> Prometheus:
    found = [shutil.which(name) for name in PROGRAMS]
    if all(found):
        return Prometheus(*(Path(str(each)) for each in found))
    folder = _cache() / "usr" / "bin"
    with FileLock(f"{_cache()}.lock"):
        if not all((folder / name).is_file() for name in PROGRAMS):
            _unpack_once()
    return Prometheus(*(folder / name for name in PROGRAMS))


def _cache() -> Path:
    root = os.environ.get("OMNIDRAFT_TEST_CACHE") or Path.home() / ".cache" / "omnidraft-tests"
    folder = Path(root, "prometheus")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def _unpack_once() -> None:
    """Other tests of this run do not try again."""
    tried, run = Path(f"{_cache()}.tried"), os.environ[RUN_VARIABLE]
    if tried.is_file() and tried.read_text() == run:
        _skip("prometheus is not on the path, and another test could not get it")
    tried.write_text(run)
    _unpack()


def _unpack() -> None:
    """Skips, or fails, where the package cannot be had."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        _skip("prometheus is not on the path, and this is no Debian to get it from")
    with tempfile.TemporaryDirectory() as folder:
        if not _has_run(["apt-get", "download", "prometheus"], folder):
            _has_run(["apt-get", "update"], folder)  # a new machine knows of no package
            if not _has_run(["apt-get", "download", "prometheus"], folder):
                _skip("prometheus is not on the path, and `apt-get download prometheus` failed")
        (package,) = Path(folder).glob("prometheus_*.deb")
        with tempfile.TemporaryDirectory(dir=_cache().parent) as beside:
            if not _has_run(["dpkg-deb", "-x", str(package), f"{beside}/whole"], folder):
                _skip(f"{package.name} cannot be unpacked into {_cache().parent}")
            Path(beside, "whole").rename(_cache())


def _has_run(command: list[str], folder: str) -> bool:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:  # no mirror answers
        return False
    return done.returncode == 0


def _skip(why: str) -> None:
    """Never returns."""
    if os.environ.get("OMNIDRAFT_REQUIRE_PROMETHEUS") == "1":
        pytest.fail(f"OMNIDRAFT_REQUIRE_PROMETHEUS=1, but {why}")
    pytest.skip(why)
