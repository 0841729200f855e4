"""C++ is compiled once for a source, compiler and processor, however many processes ask for it."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omnidraft.errors import KernelsUnavailable, ModelError
from omnidraft.models.native import build
from omnidraft.models.native.build import compiled
from omnidraft.models.native.library import open_library

SOURCE = 'extern "C" int answer() { return 42; }'
ASK = """
import sys
from pathlib import Path
from omnidraft.models.native.build import compiled
sys.stdin.read(1)
print(compiled(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def test_a_library_is_compiled_once_and_another_source_makes_another(source, tmp_path):
    first = compiled(source, tmp_path / "made")
    assert ctypes.CDLL(str(first)).answer() == 42
    made_at = first.stat().st_mtime_ns
    assert compiled(source, tmp_path / "made") == first
    assert first.stat().st_mtime_ns == made_at
    source.write_text(SOURCE.replace("42", "43"))
    assert compiled(source, tmp_path / "made") != first


def test_a_library_that_a_power_failure_emptied_is_compiled_anew(source, tmp_path):
    compiled(source, tmp_path / "made").write_bytes(b"")
    assert ctypes.CDLL(str(compiled(source, tmp_path / "made"))).answer() == 42


def test_a_library_that_cannot_be_loaded_is_unavailable(tmp_path):
    (tmp_path / "half.so").write_bytes(b"half a library")
    (tmp_path / "half.so").chmod(0o700)
    with pytest.raises(KernelsUnavailable, match=r"half\.so cannot be loaded: .*, delete it"):
        open_library(tmp_path / "half.so")


def test_a_library_whose_instructions_the_system_refuses_is_unavailable(source, tmp_path):
    source.write_text('extern "C" int omnidraft_start() { return 0; }')
    with pytest.raises(KernelsUnavailable, match=r"the system refuses answer-\w+\.so's instructions to this process"):
        open_library(compiled(source, tmp_path / "made"))


@pytest.mark.parametrize(
    ("cpuinfo", "announced"),
    [
        ("flags\t\t: fpu avx2 fma f16c\n", {"avx2", "generic"}),
        ("flags\t\t: fpu sse2\n", {"generic"}),
        ("Features\t: fp asimd asimddp\n", {"neon", "generic"}),
        ("Features\t: fp asimd asimddp i8mm bf16\n", {"neon", "neon_i8mm", "generic"}),
    ],
)
def test_variants_are_those_that_the_processor_announces(cpuinfo, announced, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    build.CPUINFO.write_text(f"processor\t: 0\n{cpuinfo}")
    names = {"avx512", "avx2", "neon_i8mm", "neon", "generic"}
    assert {name for name in names if build.is_announced(name)} == announced


def test_two_processes_at_once_end_with_one_library(source, tmp_path):
    compiled(source, tmp_path / "before")
    folder = tmp_path / "made"
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ASK, source, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in asking:
        process.stdin.write("x")
        process.stdin.flush()
    answers = {process.communicate()[0].strip() for process in asking}
    assert [process.returncode for process in asking] == [0, 0]
    assert answers == {str(path) for path in folder.glob("*.so")}
    assert not list(folder.glob("*.partial"))
    assert len(answers) == 1


def test_without_a_compiler_the_error_says_what_to_install(source, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"no g\+\+ or c\+\+; install"):
        compiled(source, tmp_path)


def test_what_the_compiler_complains_about_is_in_the_error(source, tmp_path):
    compiled(source, tmp_path / "before")
    source.write_text("int f() { return nothing; }")
    with pytest.raises(ModelError, match="nothing"):
        compiled(source, tmp_path / "made")
    assert not list((tmp_path / "made").glob("*.so"))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux which libraries are loaded")
def test_the_library_shares_torchs_openmp_threads(tmp_path):
    source = tmp_path / "threads.cpp"
    source.write_text('#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }')
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert ctypes.CDLL(str(compiled(source, tmp_path))).threads() == 3
    finally:
        torch.set_num_threads(threads)
    loaded = {
        os.path.realpath(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line
    }
    assert len([path for path in loaded if Path(path).name.startswith("libgomp.so")]) == 1


def test_a_folder_that_cannot_be_written_is_named(source, tmp_path):
    compiled(source, tmp_path / "sound")
    (tmp_path / "a file").write_text("")
    with pytest.raises(KernelsUnavailable, match=r"a file/made cannot be used: .*OMNIDRAFT_HOME"):
        compiled(source, tmp_path / "a file" / "made")
