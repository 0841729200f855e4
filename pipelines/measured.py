"""Write docs/measured.md from docs/measured.toml: `python -m pipelines.measured`."""

import tomllib
from pathlib import Path
from typing import Any

from omnidraft.hosts import process
from pipelines.lib.page import PageSection, markdown

PAGE = Path(__file__).parents[1] / "docs" / "measured.md"
ABOUT = (
    """What was measured, one machine a table, with the command that gives each figure. Quote ratios rather than tokens
a second: these machines have two cores. A speed-up is over plain decoding beside it, the median over questions, the
first pass left out. Measure yours: `make bench PROMPTS=FILE`.""",
    "<!-- Written from measured.toml by `python -m pipelines.measured`: change that file. -->",
)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.with_suffix(".toml").read_text()))


def page(data: str) -> str:
    """Return the page that shows the tables of a TOML text."""
    return markdown("Measured", ABOUT, map(_section, tomllib.loads(data)["table"]))


def _section(table: dict[str, Any]) -> PageSection:
    origin = f"{table['machine']}, {table['date']}: `{table['command']}`"
    return PageSection(table["title"], table["columns"], table["rows"], [origin], table["about"])


if __name__ == "__main__":
    process.entry("measured", main)
