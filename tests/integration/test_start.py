"""The measurement of starts, over tiny models."""

import json
from pathlib import Path

import pytest

from pipelines.bench import start
from tests.cli_runs import run_pipeline

pytestmark = pytest.mark.long


def test_the_command_reports_every_start_by_the_lines_of_the_servers_log(
    tmp_path: Path, tiny_models: tuple[Path, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    monkeypatch.setenv("OMNIDRAFT_MODELS__PRECISION", "float32")
    monkeypatch.setenv("OMNIDRAFT_MODELS__DRAFTER_PRECISION", "float32")
    target, drafter = map(str, tiny_models)
    out = tmp_path / "out.json"
    options = ["--target", target, "--drafter", drafter, "--quantize", "auto", "--starts", "1", "--json", str(out)]
    run_pipeline(start.main, *options)
    (measured,) = json.loads(out.read_text())["starts"]
    lines = [line for line, _ in measured["phases"]]
    seconds = [at for _, at in measured["phases"]]
    assert f"reading the tokenizers of {target} and {drafter}" in lines
    assert f"loading {target}" in lines
    assert 0 < seconds[0] <= seconds[-1] <= measured["ready_s"]
    assert measured["processor_s"] > 0
    assert min(measured["first_chat_s"], measured["next_chat_s"]) > 0
