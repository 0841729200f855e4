"""Write docs/measured.md from docs/measured.toml: `python -m pipelines.measured`."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omnidraft.hosts import process

PAGE = Path(__file__).parents[1] / "docs" / "measured.md"
HEAD = """# Measured

What was measured, one machine a table, with the command that gives each figure. Quote ratios rather than tokens a
second: these machines have two cores. A speed-up is over plain decoding beside it, the median over questions, the first
pass left out. Measure yours: `make bench PROMPTS=FILE`.

<!-- Written from measured.toml by `python -m pipelines.measured`: change that file. -->"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.with_suffix(".toml").read_text()))


def page(data: str) -> str:
    """Return the page that shows the tables of a TOML text."""
    return "\n\n".join([HEAD, *(_section(table) for table in tomllib.loads(data)["table"])]) + "\n"


def _section(table: dict[str, Any]) -> str:
    origin = f"{table['machine']}, {table['date']}: `{table['command']}`"
    return "\n\n".join([f"## {table['title']}", table["about"], "\n".join(_lines(table)), origin])


def _lines(table: dict[str, Any]) -> Iterator[str]:
    columns = len(table["columns"])
    for cells in (table["columns"], ["---"] * columns, *table["rows"]):
        if len(cells) != columns:
            raise ValueError(f"{table['title']}: {cells} has not {columns} cells")
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    process.entry("measured", main)
