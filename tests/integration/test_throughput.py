"""The throughput benchmark's servers: ours over tiny models, llama.cpp's programs built from a package, no orphans."""

import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import psutil
import pytest

from omnidraft.errors import ModelError
from pipelines.bench.throughput import __main__ as throughput
from pipelines.lib import llama_build
from tests.cli_runs import run_pipeline

CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(llama C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(llama-server tools/server/main.cpp)
add_executable(llama-quantize tools/server/main.cpp)
"""
BACKEND = """
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "llama_cpp_python-VERSION.dist-info"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: VERSION\\n")
    return name
def build_wheel(folder, config_settings=None, metadata_directory=None):
    raise NotImplementedError
""".replace("VERSION", llama_build.VERSION)


@pytest.mark.long
def test_the_command_measures_our_server_and_leaves_no_process(
    tmp_path: Path, tiny_models: tuple[Path, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    before = set(psutil.Process().children())
    settings = tmp_path / "settings.toml"
    settings.write_text('[models]\nprecision = "float32"\ndrafter_precision = "float32"\n[decode]\nthreads = 1\n')
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "How many clips in"}\n{"prompt": "A robe takes"}\n')
    out = tmp_path / "out.json"
    run_pipeline(
        throughput.main,
        *("--prompts", prompts, "--systems", "omnidraft", "--clients", "1,2", "--num-prompts", 2),
        *("--max-new-tokens", 8, "--target", tiny_models[0], "--drafter", tiny_models[1], "--config", settings),
        *("--long-prompt", 64, "--second-turn", 64, "--json", out),
    )
    report = json.loads(out.read_text())
    assert [(row["clients"], row["requests"], row["num_errors"]) for row in report["rows"]] == [(1, 2, 0), (2, 4, 0)]
    for row in report["rows"]:
        assert row["tokens_per_s"] > 0
        assert row["tokens"] > 0
        assert row["prompt_tokens"] > 0
        assert row["first_token_s"]["median"] <= row["first_token_s"]["p99"]
    assert report["settings"]["scheduler"]["max_num_seqs"] == 5, "four running texts and the long prompt"
    assert report["long_prompt"]["omnidraft"]["gap_before_s"]["largest"] > 0
    assert report["second_turn"]["omnidraft"]["times_sooner"] > 0
    assert set(psutil.Process().children()) <= before


@pytest.mark.long
@pytest.mark.skipif(not all(map(shutil.which, ("cmake", "make", "c++"))), reason="cmake, make or a compiler is missing")
def test_programs_are_built_once_from_the_source_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip takes the package from a folder; its llama.cpp is two programs that print a line."""
    _write_package(tmp_path / "packages")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "packages"))
    programs = llama_build.llama_programs(tmp_path / "home")
    assert subprocess.run([programs.server], capture_output=True, text=True).stdout == "serving\n"
    assert programs.quantize.exists()
    built = programs.server.stat().st_mtime_ns
    assert sorted(path.name for path in programs.folder.parent.iterdir()) == [".lock", "bin", "build.log"]
    shutil.rmtree(tmp_path / "packages")
    assert llama_build.llama_programs(tmp_path / "home").server.stat().st_mtime_ns == built


def _write_package(folder: Path) -> None:
    folder.mkdir()
    root = f"llama_cpp_python-{llama_build.VERSION}"
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: {llama_build.VERSION}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND,
        "vendor/llama.cpp/CMakeLists.txt": CMAKE,
        "vendor/llama.cpp/tools/server/main.cpp": '#include <cstdio>\nint main() { puts("serving"); }\n',
    }
    with tarfile.open(folder / f"{root}.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{root}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [("CXX", "no-such-compiler", "no C\\+\\+ compiler"), ("PATH", "", "compiler|cmake")],
)
def test_what_the_build_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ModelError, match=reason):
        llama_build.llama_programs(tmp_path)
