"""Runs every block of commands, and the Python, of README and docs as a new user would: `make docs-test`.

Each page starts in a fresh copy of the checkout. Its blocks run in order; a server that one of them starts answers to
the end of the page, whose Python runs last, as one script. A comment above a block, which readers do not see, says what
else is to be known:

    <!-- docs-test: skip, needs a Docker daemon -->
    <!-- docs-test: with FILE=answers.jsonl DIR=runs/learned -->

The first is listed with its reason, the second stands for the words in capitals. Exit code 1: a block failed.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from omnidraft.demo.local_cluster import LocalCluster, is_serving
from omnidraft.errors import OmnidraftError
from tests.doc_blocks import PAGES, ROOT, SHELL, Block, blocks, commands

SERVER = "http://127.0.0.1:8000"
START_S, BLOCK_S = 600.0, 1800.0
COMMAND = re.compile(
    r"^(\.venv/bin/|\w+=\S+ )*(omnidraft|python|make|pip|curl|serve|docker|kubectl|ray|mlflow|export) "
)
"""How a command begins; other blocks are pictures and settings."""


def main(
    pages: Annotated[list[str] | None, typer.Argument(help="Names such as README.md; all without one.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Run nothing.")] = False,
) -> None:
    """Run the blocks of the pages, and list those that were skipped and why."""
    unknown = set(pages or ()) - {page.name for page in PAGES}
    if unknown:
        raise typer.BadParameter(f"no page {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PAGES)}")
    failed = []
    for page in PAGES:
        if not pages or page.name in pages:
            failed += _run_page(page, list_only)
    if not list_only:
        print("\n".join(["", *(f"FAILED {each}" for each in failed)]) or "every block ran")
    raise typer.Exit(bool(failed))


def _run_page(page: Path, list_only: bool) -> Iterator[str]:
    """Yield the place and the problem of each block that failed."""
    wanted = []
    for block in filter(_is_for_running, blocks(page)):
        reason = (block.note or "").removeprefix("skip, ")
        is_skipped = block.note is not None and block.note.startswith("skip, ")
        print(f"{'skipped' if is_skipped else 'runs':8} {block.place}{f': {reason}' if is_skipped else ''}", flush=True)
        wanted += [] if is_skipped else [block]
    if wanted and not list_only:
        with _checkout() as folder:
            yield from _run_blocks(wanted, folder)


def _is_for_running(block: Block) -> bool:
    if block.language == "python":
        return True
    return block.language in SHELL and any(map(COMMAND.match, commands(block)))


def _run_blocks(wanted: list[Block], folder: Path) -> Iterator[str]:
    with LocalCluster(folder / "runs" / "servers", _environ(folder)) as servers:
        for block in wanted:
            if block.language in SHELL:
                yield from _run_shell(block, folder, servers)
        script = folder / "page.py"
        script.write_text("\n".join(block.text for block in wanted if block.language == "python"))
        if script.stat().st_size:
            yield from problem(f"the Python of {wanted[0].page.name}", [sys.executable, str(script)], folder)


def _run_shell(block: Block, folder: Path, servers: LocalCluster) -> Iterator[str]:
    """Run all lines of a block in one shell but those that start a server, which runs on beside the rest."""
    lines = [_filled_in(line, block) for line in commands(block)]
    for line in [line for line in lines if re.match(r"omnidraft serve\b", line)]:
        print(f"         {line}", flush=True)
        servers.start("server", ["bash", "-c", f"cd {folder} && exec {line}"])
        try:
            servers.wait_for(lambda: is_serving(SERVER), f"server of {block.place}", START_S)
        except OmnidraftError as exc:
            yield f"{block.place}: {exc}"
    others = "\n".join(line for line in lines if not re.match(r"omnidraft serve\b", line))
    yield from problem(block.place, ["bash", "-euo", "pipefail", "-c", others], folder)


def problem(place: str, command: list[str], folder: Path) -> Iterator[str]:
    """Run a command to its end, and yield what went wrong. Nothing that it started outlives it."""
    started = time.monotonic()
    with _session(command, folder) as process:
        try:
            output, errors = process.communicate(timeout=BLOCK_S)
        except subprocess.TimeoutExpired:
            yield f"{place}: took more than {BLOCK_S:g} s"
            return
    print(f"         {place}: exit code {process.returncode} after {time.monotonic() - started:.0f} s", flush=True)
    if process.returncode != 0:
        yield f"{place}: exit code {process.returncode}\n{output[-1000:]}\n{errors[-2000:]}"


@contextmanager
def _session(command: list[str], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a command in a session of its own, which ends with the `with` block."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=folder, env=_environ(folder), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _filled_in(line: str, block: Block) -> str:
    """Return the line with what the block's note gives for its words in capitals."""
    given = (block.note or "").removeprefix("with ").split() if (block.note or "").startswith("with ") else []
    for name, _, value in (each.partition("=") for each in given):
        line = re.sub(rf"\b{name}\b", value, line)
    return line


def _environ(folder: Path) -> dict[str, str]:
    programs = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}


@contextmanager
def _checkout() -> Iterator[Path]:
    """Yield a copy of what git tracks, with this checkout's virtual environment, which `make setup` finds done."""
    with tempfile.TemporaryDirectory(prefix="omnidraft-docs-") as name:
        folder = Path(name)
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        subprocess.run(["cp", "--parents", "-t", name, *files.splitlines()], cwd=ROOT, check=True)
        (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
        yield folder


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends what its blocks started
    typer.run(main)
