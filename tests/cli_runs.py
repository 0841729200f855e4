"""Command lines run inside the test's process: its imports are paid once."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import typer

from omnidraft.cli import main

Environ = Callable[[Mapping[str, str]], None]
"""Sets variables until the test ends."""


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


def made_once(made: dict[str, bytes], path: Path, command: Callable[..., None], *arguments: object) -> Path:
    """The file that a pipeline writes to `--out`; it runs once for all tests that share `made`."""
    if path.name not in made:
        run_pipeline(command, *arguments, "--out", path)
        made[path.name] = path.read_bytes()
    path.write_bytes(made[path.name])
    return path
