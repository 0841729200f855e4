"""Command lines run inside the test's process: its imports are paid once."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import typer

from omnidraft.cli import main

Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs a command with these arguments."""
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


def tiny_pair_environ(home: Path, models: tuple[Path, Path]) -> dict[str, str]:
    """Return the environment in which the tiny models are the pair, in float32, on one thread."""
    return {
        "OMNIDRAFT_HOME": str(home),
        "OMNIDRAFT_MODELS__TARGET": str(models[0]),
        "OMNIDRAFT_MODELS__DRAFTER": str(models[1]),
        "OMNIDRAFT_MODELS__PRECISION": "float32",
        "OMNIDRAFT_MODELS__DRAFTER_PRECISION": "float32",
        "OMNIDRAFT_DECODE__THREADS": "1",
    }
