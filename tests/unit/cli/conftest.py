"""A log and a registry of the test's own, and a command over them."""

from pathlib import Path

import pytest

from tests.cli_runs import Run, run_cli


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db",
        "OMNIDRAFT_REGISTRY__URL": f"directory:///{tmp_path}/registry",
        "OMNIDRAFT_MODELS__TARGET": "big",
        "COLUMNS": "80",
    }


@pytest.fixture
def command(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_cli(arguments, monkeypatch, capsys, environ)
