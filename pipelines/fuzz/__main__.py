"""Hostile messages through the real consumer: none may crash it, be lost, or be both returned and dead-lettered.

`python -m pipelines.fuzz --num N --json OUT`. Sound messages are recorded traffic.
"""

from pathlib import Path
from typing import Annotated

import typer

from omnidraft.hosts import process
from pipelines.fuzz import batches
from pipelines.lib import report


def main(
    num: Annotated[int, typer.Option(min=1, help="Messages.")] = 10_000,
    seed: Annotated[int, typer.Option(help="The same seed sends the same messages.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
) -> None:
    """Send hostile messages and account for every one."""
    figures = batches.run(num, seed=seed)
    print(figures)
    if json_path is not None:
        report.save(figures, json_path)


if __name__ == "__main__":
    process.entry("fuzz", main)
