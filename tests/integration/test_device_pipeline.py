"""The device pipeline gives every figure that it promises, on tiny models."""

import json
from pathlib import Path

import pytest

from omnidraft.errors import RequestError
from pipelines.device import __main__ as device
from tests.cli_runs import run_pipeline as run


@pytest.fixture(autouse=True)
def environ(omnidraft_home: Path, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {
        "OMNIDRAFT_HOME": str(omnidraft_home),
        "OMNIDRAFT_MODELS__TARGET": str(tiny_models[0]),
        "OMNIDRAFT_MODELS__DRAFTER": str(tiny_models[1]),
        "OMNIDRAFT_MODELS__PRECISION": "float32",
        "OMNIDRAFT_MODELS__DRAFTER_PRECISION": "float32",
        "OMNIDRAFT_LEARNER__RECORDS_PER_STEP": "2",
        "OMNIDRAFT_LEARNER__STEPS_PER_SNAPSHOT": "1",
        "OMNIDRAFT_DECODE__THREADS": "1",
        "OMNIDRAFT_DECODE__POLICY": "fixed",
    }
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"How many clips are {number}?"}) + "\n" for number in range(12)))
    return path


def test_costs_stages_and_curve_are_reported(prompts: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "report.json", tmp_path / "report.png"
    options = ("--at", "8", "--num-test", "2", "--max-new-tokens", "8", "--json", out, "--picture", picture)
    run(device.main, "--prompts", prompts, "--home", tmp_path / "home", *options)
    report = json.loads(out.read_text())
    assert [each["num_requests"] for each in report["stages"]] == [0, 8]
    assert all(each["tokens_per_pass"] >= 1 and each["cpu_s_per_token"] > 0 for each in report["stages"])
    first, *_, last = report["curve"]
    assert (first["num_tokens"], first["gain"], first["gain_error"]) == (0, 0, 0), "the drafter as it came"
    assert last["num_tokens"] == report["costs"]["tokens_learned"] > 0
    assert report["costs"]["records_recorded"] == 8
    assert report["costs"]["peak_gib_learning"] >= report["costs"]["peak_gib_decoding"] > 0
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("at", ["none", "0", "", "50"])
def test_stages_that_cannot_be_are_refused(prompts: Path, tmp_path: Path, at: str) -> None:
    with pytest.raises(RequestError):
        run(device.main, "--prompts", prompts, "--home", tmp_path / "home", "--at", at)
    assert not (tmp_path / "home").exists()
