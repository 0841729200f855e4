"""`omnidraft status` shows names from outside as they are, and words and numbers whole in any terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from omnidraft.cli.status import FittingTable
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


def fleet_table() -> FittingTable:
    table = FittingTable("target", "name", "agreement before", "records", "lag", "learning")
    table.add_row("qwen2.5-coder-1.5b", "champion", "0.500", "1,234", "19,134 (0: 12,345, 1: 6,789)", "paused")
    table.add_row("", "challenger", "0.625", "12,345")
    table.add_row("gemma3-270m", "no version", "", "", "3", "on")
    return table


def shown(table: FittingTable, width: int) -> str:
    console = Console(width=width, markup=False, highlight=False, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table_wider_than_the_terminal_is_turned_on_its_side() -> None:
    wide, narrow = shown(fleet_table(), 120), shown(fleet_table(), 80)
    assert "│ qwen2.5-coder-1.5b │ champion " in wide
    assert max(map(len, narrow.splitlines())) <= 80
    first, second = narrow.split("target gemma3-270m\n")
    assert first.startswith("target qwen2.5-coder-1.5b\n")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in first.splitlines() if "│" in line]
    assert rows == [
        ["name", "champion", "challenger"],
        ["agreement before", "0.500", "0.625"],
        ["records", "1,234", "12,345"],
        ["lag", "19,134 (0: 12,345, 1: 6,789)", ""],
        ["learning", "paused", ""],
    ]
    assert "no version" in second
    assert "records" not in second
