"""What pipelines and the demo start computes on the processors of its container, not on all of the machine."""

import os
from pathlib import Path

import pytest

from omnidraft import system
from omnidraft.demo import run
from omnidraft.errors import ModelError
from pipelines.bench.throughput import systems
from pipelines.lib import llama_build, machine
from pipelines.lib.vllm_server import serve
from tests.soak.part import SoakPlan

QUOTA = 3


@pytest.fixture(autouse=True)
def _container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of three processors, on four that are not the first of the machine."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    (folder / "cpu.max").write_text(f"{QUOTA}00000 100000\n")
    monkeypatch.setattr(system, "CGROUP", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {20, 4, 8, 6}, raising=False)


def script(path: Path, line: str) -> None:
    """Write a program that stands for another one."""
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_llamacpp_is_built_and_served_with_as_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = llama_build.LlamaPrograms(tmp_path)
    command = systems.llama_server_command(programs, tmp_path / "model.gguf", 8000, num_slots=1, slot_tokens=64)
    assert command[-2:] == ["--threads", str(QUOTA)]
    script(tmp_path / "bin" / "cmake", 'echo "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    llama_build.build(tmp_path, ["llama-server"], {})
    assert f"--parallel {QUOTA} --target llama-server" in (tmp_path / "build.log").read_text()


@pytest.mark.parametrize(("threads", "told"), [(None, f"{QUOTA} on 4,6,8"), (2, "2 on 4,6")])
def test_vllm_is_bound_to_the_first_of_its_own_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, told: str
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    script(tmp_path / "bin" / "python", 'echo "threads: $OMP_NUM_THREADS on $VLLM_CPU_OMP_THREADS_BIND"; exit 3')
    log = tmp_path / "vllm.log"
    with pytest.raises(ModelError, match=f"threads: {told}$"), serve(tmp_path, tmp_path, log, threads=threads):
        pass


def test_plans_settings_and_reports_count_the_same(tmp_path: Path) -> None:
    demo = run.DemoPlan(tmp_path, num_questions=1, max_tokens=8, num_recorded=4, num_live=0, num_snapshots=1)
    assert run.demo_settings(demo, None).learner.threads == QUOTA
    assert SoakPlan(tmp_path).threads == QUOTA
    assert machine.describe()["cores"] == QUOTA
