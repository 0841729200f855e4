"""The kernels for ARM, translated and run by qemu: each build gives the bits of this processor's.

Needs Debian's g++-aarch64-linux-gnu and qemu-user.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from omnidraft.models.native.build import ARM, FLAGS, SOURCE, find_compiler

PROGRAM = Path(__file__).with_name("pass_bits.cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "max")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(map(shutil.which, ("g++", COMPILER, EMULATOR[0]))), reason="no compiler for ARM, or no qemu-user"
    ),
]


def printed(compiler: str, folder: Path, flags: tuple[str, ...], source: Path, *run_by: str) -> list[str]:
    """Return the lines that the program prints when it is compiled like the library."""
    binary = folder / "pass_bits"
    common = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    command = [compiler, *common, *flags, "-static", "-I", str(source), "-o", str(binary), str(PROGRAM)]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([*run_by, str(binary)], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What this processor prints."""
    return printed(find_compiler(), tmp_path_factory.mktemp("here"), (), SOURCE.parent)


@pytest.mark.parametrize("variant", ARM)
def test_arm_gives_the_bits_of_every_other_processor(variant: str, here: list[str], tmp_path: Path) -> None:
    there = printed(COMPILER, tmp_path, ARM[variant], SOURCE.parent, *EMULATOR)
    assert there == here
    assert sum(line.startswith("passes") for line in here) == 4


def test_a_wrong_product_is_caught(here: list[str], tmp_path: Path) -> None:
    sources = tmp_path / "kernels"
    sources.mkdir()
    for file in SOURCE.parent.iterdir():
        changed = file.read_text().replace("vshlq_n_s32(lowered[r], 7)", "vshlq_n_s32(lowered[r], 6)")
        (sources / file.name).write_text(changed)
    there = printed(COMPILER, tmp_path, ARM["neon"], sources, *EMULATOR)
    differing = [mine.split()[:2] for mine, others in zip(here, there, strict=True) if mine != others]
    assert differing
    assert all(kind in ("2", "2:", "3:") for _, kind in differing), "int8, and int4's head"
