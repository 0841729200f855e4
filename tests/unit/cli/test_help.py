"""`--help` answers at once: it loads neither settings nor models nor clients of services."""

import subprocess
import sys

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
