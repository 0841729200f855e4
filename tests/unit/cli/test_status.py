"""`omnidraft status` shows names from outside as they are."""

from pathlib import Path

import pytest

from tests.cli_runs import run_cli


def test_a_target_whose_name_looks_like_markup_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"OMNIDRAFT_MODELS__TARGET": "[/x]", "COLUMNS": "200"}
    done = run_cli(("status", "--worker", "http://127.0.0.1:9"), monkeypatch, capsys, environ)
    assert done.returncode == 1, done.stderr
    assert "[/x]" in done.stdout
