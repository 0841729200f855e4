"""The `omnidraft` command, one file per group. Heavy imports stay inside the commands, so that --help is quick."""

import io
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Annotated

import typer

from omnidraft import __version__
from omnidraft.child import run_supervised
from omnidraft.cli import learning, models, run, snapshots, tenants, traces
from omnidraft.cli.chat import chat
from omnidraft.cli.check import check
from omnidraft.cli.demo import demo
from omnidraft.cli.doctor import doctor
from omnidraft.cli.generate import generate
from omnidraft.cli.options import group, printable
from omnidraft.cli.replay import replay
from omnidraft.cli.run import serve
from omnidraft.cli.settings import settings
from omnidraft.cli.status import status
from omnidraft.cli.transfer import transfer
from omnidraft.cli.verify import verify
from omnidraft.cli.whatif import costs_app, whatif
from omnidraft.errors import OmnidraftError
from omnidraft.progress import stages

HELP = "Speculative decoding across tokenizers that keeps learning while it serves."

app = group(HELP)
app.command()(generate)
app.command()(chat)
app.command()(demo)
app.command()(serve)
app.command()(check)
app.command()(verify)
app.command()(status)
app.command()(doctor)
app.command()(whatif)
app.command()(replay)
app.command()(settings)
app.command()(transfer)
app.add_typer(models.app, name="models")
app.add_typer(traces.app, name="traces")
app.add_typer(tenants.app, name="tenants")
app.add_typer(snapshots.app, name="snapshots")
app.add_typer(learning.app, name="learning")
app.add_typer(costs_app, name="costs")
app.add_typer(run.app, name="run")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback(help=HELP)
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options of the program itself."""


class _LibraryNotice(MetaPathFinder):
    """Says on stderr that libraries are loaded, before the largest of them is, which takes seconds. Services log it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing; see importlib.abc.MetaPathFinder."""
        if fullname == "torch":
            sys.meta_path.remove(self)
            if not stages.isEnabledFor(logging.INFO):
                print("omnidraft: loading libraries", file=sys.stderr, flush=True)


def entry() -> None:
    """The program `omnidraft`."""
    sys.meta_path.insert(0, _LibraryNotice())
    run_supervised(main)


def main() -> None:
    """Run the command line: what it refuses is one line on stderr and exit code 2."""
    _replace_unencodable()
    try:
        app()
    except OmnidraftError as exc:
        lines = map(printable, str(exc).split("\n"))  # of servers and files, maybe
        print("omnidraft:", "\n".join(lines), file=sys.stderr)
        sys.exit(2)


def _replace_unencodable() -> None:
    """Print a question mark for each character that the encoding of the output lacks: a model may write any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
