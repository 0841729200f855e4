"""`omnidraft status` shows names from outside as they are, and words and numbers whole in any terminal."""

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


def test_names_are_whole_in_a_narrow_table_and_a_problem_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"OMNIDRAFT_MODELS__TARGET": "qwen2.5-coder-1.5b", "COLUMNS": "80"}
    shown = run_cli(("status", "--worker", "http://127.0.0.1:9"), monkeypatch, capsys, environ).stdout
    assert "target qwen2.5-coder-1.5b\n" in shown
    assert "worker http://127.0.0.1:9\n" in shown
    assert "…" not in shown
    assert shown.count("refused") == 1
