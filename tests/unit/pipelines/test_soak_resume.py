"""A soak that is resumed keeps the parts that ran to their end with the same options, and what broke in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from pipelines.lib.check_result import CheckResult
from pipelines.soak import __main__
from pipelines.soak.plan import SoakPlan
from tests.cli_runs import run_pipeline


def save_part(out: Path, name: str, figures: dict[str, Any], broken: str) -> None:
    """The file of a part that an earlier run with the default options left."""
    about = {"machine": {}, "command": "", "seconds": 1, "plan": __main__._fields(SoakPlan(out))}
    (out / "parts").mkdir()
    (out / "parts" / f"{name}.json").write_text(json.dumps({"figures": figures, "promises": {broken: False}} | about))


def test_a_part_that_did_not_run_to_its_end_is_run_again(tmp_path: Path) -> None:
    save_part(tmp_path, "fuzz", {}, "fuzz runs to its end: no memory")
    run_pipeline(__main__.main, "--parts", "fuzz", "--fuzzed", 400, "--resume", "--out", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["broken"] == []
    assert sum(report["parts"]["fuzz"]["figures"]["fates"].values()) == 400


def test_a_broken_promise_of_an_earlier_run_fails_the_report_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_part(tmp_path, "kills", {"kills": 1}, "nothing breaks")
    app = typer.Typer()
    app.command()(__main__.main)
    with pytest.raises(SystemExit) as ended:
        app(["--parts", "kills", "--resume", "--out", str(tmp_path)])
    assert ended.value.code == 1
    assert "BROKEN: kills: nothing breaks" in capsys.readouterr().out


def test_a_part_that_was_measured_with_other_options_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first look must not stand in the report of the whole soak."""
    asked: list[int] = []

    def part(plan: SoakPlan) -> CheckResult:
        asked.append(plan.kills)
        return CheckResult({"kills": plan.kills}, {})

    monkeypatch.setattr(__main__, "_part", lambda name: part)
    for options in (("--kills", 10), ("--resume", "--kills", 10), ("--resume",), ("--resume",)):
        run_pipeline(__main__.main, "--parts", "kills", "--out", tmp_path, *options)
    assert asked == [10, 100]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["parts"]["kills"]["figures"] == {"kills": 100}
