"""The benchmark of passes: engines in processes, rows that follow from their times, failures with their reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from omnidraft.errors import ModelError, RequestError
from pipelines.bench.kernels import __main__ as command
from pipelines.bench.kernels import measurement
from pipelines.bench.kernels.engine import MAX_ROWS, EngineSpec, load
from pipelines.bench.kernels.measurement import running
from tests.cli_runs import run_pipeline
from tests.unit.models.tiny import SHAPE

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
IN_A_CONTAINER = """
import sys, torch
from pathlib import Path
from omnidraft import system
from pipelines.bench.kernels import engine
system.CGROUP = Path(sys.argv[1])
torch.set_num_threads(2)
engine.main(engine.EngineSpec("torch", "float32", "auto", sys.argv[2]))
"""


def spec(model: Path, system: str = "omnidraft", format: str = "packed16", variant: str = "auto") -> EngineSpec:
    return EngineSpec(system, format, variant, str(model))


@pytest.mark.parametrize(("system", "format"), [("omnidraft", "packed16"), ("torch", "float32")])
def test_passes_and_prompts_are_timed(system: str, format: str, tiny_models: tuple[Path, Path]) -> None:
    engine = load(spec(tiny_models[0], system, format))
    assert engine.answer({"pass": 3})["seconds"] > 0
    assert engine.answer({"prompt": MAX_ROWS + 3})["seconds"] > 0
    assert engine.weight_bytes > 0


def test_the_bytes_of_a_pass_are_those_of_one_rows_experts(tmp_path: Path) -> None:
    def weight_bytes(**changes: int) -> int:
        folder = tmp_path / str(changes)
        config = AutoConfig.for_model("qwen3_moe", **SHAPE, moe_intermediate_size=32, **changes)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return load(spec(folder)).weight_bytes

    one, two = (weight_bytes(num_experts=4, num_experts_per_tok=count) for count in (1, 2))
    assert two - one == SHAPE["num_hidden_layers"] * 3 * SHAPE["hidden_size"] * 32 * 2
    assert two == weight_bytes(num_experts=8, num_experts_per_tok=2)


def test_an_engine_computes_on_no_more_threads_than_its_containers_quota(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    command = [sys.executable, "-c", IN_A_CONTAINER, str(tmp_path), str(tiny_models[0])]
    ran = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(ran.stdout)["threads"] == 1


def test_a_process_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exit code 1: KeyError: 'magic'"), running(spec(tmp_path, "magic")):
        pass


def test_the_command_saves_a_row_for_every_engine_and_number_of_rows(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build without kernels of ours is an engine that cannot be loaded."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    monkeypatch.setattr(sys, "argv", ["kernels", "--and", "so on"])
    command.main(
        target=str(tiny_models[0]),
        systems="omnidraft",
        formats="int8",
        variants="auto,torch",
        rows=f"1,{MAX_ROWS + 1}",
        repeats=2,
        limits=False,
        json_path=tmp_path / "kernels.json",
        markdown_path=tmp_path / "kernels.md",
    )
    report = json.loads((tmp_path / "kernels.json").read_text())
    failed, one, prompt = sorted(report["rows"], key=lambda row: row["rows"] or 0)
    assert "asks for no kernels" in failed["error"]
    assert (one["rows"], one["repeats"], one["error"]) == (1, 2, None)
    assert one["gb_per_s"] == pytest.approx(one["weight_bytes"] / one["ms"] / 1e6, rel=0.1)
    assert prompt["gb_per_s"] is None
    assert prompt["tokens_per_s"] > 0
    assert report["machine"]["processor"] in (tmp_path / "kernels.md").read_text()
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_limits_are_none_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "cannot be compiled" in str(measurement.machine_limits()["error"])


def test_numbers_of_rows_are_checked() -> None:
    with pytest.raises(RequestError, match="--rows"):
        run_pipeline(command.main, "--rows", "0")
