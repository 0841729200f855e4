"""The benchmark of passes: engines in processes, rows that follow from their times, failures with their reason."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omnidraft.errors import ModelError, RequestError
from omnidraft.models.hf.target import load_model
from pipelines.bench.engines.engine import MAX_ROWS, Engine, EngineSpec
from pipelines.bench.engines.engine_process import running
from pipelines.bench.engines.native_engine import NativeEngine
from pipelines.bench.engines.torch_engine import TorchEngine
from pipelines.bench.engines.worker import answer
from pipelines.bench.kernels import __main__ as command
from pipelines.bench.kernels import machine_limits, page
from tests.cli_runs import run_pipeline

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
IN_A_CONTAINER = """
import sys, torch
from pathlib import Path
from omnidraft import container_limits
from pipelines.bench.engines import worker
from pipelines.bench.engines.engine import EngineSpec
container_limits.CGROUP = Path(sys.argv[1])
torch.set_num_threads(2)
worker.main(EngineSpec("torch", "float32", "auto", sys.argv[2]))
"""


def spec(model: Path, system: str = "omnidraft", format: str = "packed16", variant: str = "auto") -> EngineSpec:
    return EngineSpec(system, format, variant, str(model))


@pytest.fixture(params=["omnidraft", "torch"])
def engine(request: pytest.FixtureRequest, tiny_models: tuple[Path, Path]) -> Engine:
    if request.param == "torch":
        return TorchEngine(spec(tiny_models[0], "torch", "float32"))
    return NativeEngine(spec(tiny_models[0]))


def test_scores_are_the_models_own_however_the_text_is_cut_into_passes(
    engine: Engine, tiny_models: tuple[Path, Path]
) -> None:
    """A text longer than a pass, and one after it."""
    model: Any = load_model(tiny_models[0]).float()
    for length in (2 * MAX_ROWS + 5, 20):
        ids = [(5 * at) % 300 + 1 for at in range(length)]
        expected_NV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        got = answer(engine, {"score": ids})
        expected = expected_NV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(got["log_probs"]), expected, atol=1e-3)
        assert len(got["best"]) == length - 1


def test_generated_tokens_are_the_likeliest_of_their_own_text(engine: Engine) -> None:
    prompt = list(range(3, 3 + MAX_ROWS + 2))
    ids = answer(engine, {"generate": prompt, "num": 5})["ids"]
    assert answer(engine, {"score": prompt + ids})["best"][-5:] == ids


def test_passes_and_prompts_are_timed(engine: Engine) -> None:
    assert answer(engine, {"pass": 3})["seconds"] > 0
    assert answer(engine, {"prompt": MAX_ROWS + 3})["seconds"] > 0
    assert 8 * engine.weight_bytes / engine.num_weights >= 16


def test_an_engine_computes_on_no_more_threads_than_its_containers_quota(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    command = [sys.executable, "-c", IN_A_CONTAINER, str(tmp_path), str(tiny_models[0])]
    ran = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(ran.stdout)["threads"] == 1


def test_a_process_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"exit code 1: .*no such system"), running(spec(tmp_path, "magic")):
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


def test_a_table_has_gaps_where_nothing_was_measured() -> None:
    known = {"system": "omnidraft", "format": "int8", "variant": "native", "error": None, "gb_per_s": 2.0}
    rows = [known | {"rows": 1, "ms": 3.0}, known | {"rows": None, "ms": None, "format": "int4", "error": "no"}]
    assert page._lines(rows) == [["omnidraft", "int8", "native", "3", "2.0"], ["omnidraft", "int4", "native", "-", "-"]]


def test_limits_are_none_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "cannot be compiled" in str(machine_limits.measure()["error"])


def test_numbers_of_rows_are_checked() -> None:
    with pytest.raises(RequestError, match="--rows"):
        run_pipeline(command.main, "--rows", "0")
