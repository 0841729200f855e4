"""Command lines run inside the test's process: its imports are paid once."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest
import typer

from omnidraft.cli import main


def run_cli(
    arguments: Sequence[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """What a process of its own would have returned and printed."""
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["omnidraft", *map(str, arguments)])
        for name, value in (environ or {}).items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
    said = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), said.out, said.err)


def run_pipeline(command: Callable[..., None], *arguments: object) -> None:
    """A pipeline's command as typer would call it; its errors come through."""
    app = typer.Typer()
    app.command()(command)
    app([str(argument) for argument in arguments], standalone_mode=False)
