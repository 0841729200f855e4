"""`--help` answers at once: it loads neither settings nor models nor clients of services."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch", "transformers", "pydantic", "numpy", "ray", "mlflow", "kafka", "fastapi", "httpx", "asyncio")
CODE = """
import sys
from omnidraft.cli import main
sys.argv[1:] = {arguments!r}
try:
    main()
except SystemExit as exit:
    print("loaded:", *sorted(set({slow!r}) & set(sys.modules)), file=sys.stderr)
    sys.exit(exit.code)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["snapshots", "--help"]], ids=" ".join)
def test_help_loads_nothing_slow(arguments):
    of_typer = {"pydantic"} if len(arguments) > 1 else set()  # typer itself reads a subcommand's parameters with it
    code = CODE.format(arguments=arguments, slow=tuple(set(SLOW) - of_typer))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "loaded:\n")


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("snapshots", "list"),
        ("generate", "--prompt", "x"),
        ("verify", "receipt.json"),
        ("run", "controller"),
        ("run", "distiller"),
    ],
    ids=" ".join,
)
def test_something_is_said_before_libraries_are_loaded(command: tuple[str, ...], tmp_path: Path) -> None:
    """On a pipe, too. A library that ends the process stands for the one that takes seconds."""
    (tmp_path / "torch.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "receipt.json").write_text('{"payloadType": "x"}')
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "omnidraft.cli", *command],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "loading libraries" in done.stderr) == (7, True), done
