"""The device pipeline gives every figure that it promises, on tiny models."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from omnidraft.errors import RequestError
from pipelines.device import __main__ as device
from pipelines.device import pictures
from pipelines.device.curve import CurvePoint
from pipelines.device.user import Stage
from pipelines.lib import report
from pipelines.lib.pictures import picture
from tests.cli_runs import Environ
from tests.cli_runs import run_pipeline as run


@pytest.fixture(autouse=True)
def environ(pipeline_environ: Environ) -> None:
    pipeline_environ(
        {
            "OMNIDRAFT_LEARNER__RECORDS_PER_STEP": "2",
            "OMNIDRAFT_LEARNER__STEPS_PER_SNAPSHOT": "1",
            "OMNIDRAFT_DECODE__POLICY": "fixed",
        }
    )


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"How many clips are {number}?"}) + "\n" for number in range(12)))
    return path


def test_costs_stages_and_curve_are_reported(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written after every stage, with the costs of all days, and after every point of the curve."""
    out, picture = tmp_path / "report.json", tmp_path / "report.png"
    save, written = report.save, []

    def save_and_count(content: dict[str, Any], path: Path) -> None:
        written.append((len(content["stages"]), "tokens_learned" in content["costs"], len(content["curve"])))
        save(content, path)

    monkeypatch.setattr(report, "save", save_and_count)
    options = ("--at", "8", "--num-test", "2", "--max-new-tokens", "8", "--json", out, "--picture", picture)
    run(device.main, "--prompts", prompts, "--home", tmp_path / "home", *options)
    content = json.loads(out.read_text())
    assert [each["num_requests"] for each in content["stages"]] == [0, 8]
    assert all(each["tokens_per_pass"] >= 1 and each["cpu_s_per_token"] > 0 for each in content["stages"])
    first, *_, last = content["curve"]
    assert (first["num_tokens"], first["gain"], first["gain_error"]) == (0, 0, 0), "the drafter as it came"
    assert last["num_tokens"] == content["costs"]["tokens_learned"] > 0
    assert content["costs"]["records_recorded"] == 8
    assert content["command"].startswith("python -m pipelines.device")
    assert content["options"] | {"split": None, "pause_every": 4, "at": [8]} == content["options"]
    assert content["settings"]["decode"]["policy"] == "fixed"
    assert content["costs"]["peak_gib_learning"] >= content["costs"]["peak_gib_decoding"] > 0
    assert picture.stat().st_size > 1000
    points = [(2, True, number) for number in range(len(content["curve"]) + 1)]
    assert written == [(1, False, 0), (2, False, 0), *points]
    assert [0 < len(ids) <= 8 for ids in content["answers"]] == [True, True]


def test_the_picture_says_whose_error_its_bars_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement's own error, of other prompts, is larger than that of its gain on the same ones."""
    panels: list[Any] = []

    @contextmanager
    def kept(path: Path, **subplots: Any) -> Iterator[tuple[Any, Any]]:
        with picture(path, **subplots) as (figure, axes):
            panels.extend(axes)
            yield figure, axes

    monkeypatch.setattr(pictures, "picture", kept)
    curve = [CurvePoint(0, 0, 0, 0.7, 0.0, None), CurvePoint(1, 8, 900, 0.8, 0.1, 0.01)]
    pictures.draw([Stage(0, 1.5, 0.1, 9.0, 0.1, 0.7, None)], curve, tmp_path / "days.png")
    assert "error of the gain over the first" in panels[0].get_ylabel()


@pytest.mark.parametrize("at", ["none", "0", "", "50"])
def test_stages_that_cannot_be_are_refused(prompts: Path, tmp_path: Path, at: str) -> None:
    with pytest.raises(RequestError):
        run(device.main, "--prompts", prompts, "--home", tmp_path / "home", "--at", at)
    assert not (tmp_path / "home").exists()
