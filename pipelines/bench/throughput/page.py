"""The benchmark's tables for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.bench.throughput.clients import Row
from pipelines.lib import page
from pipelines.lib.page import PageSection, number

COLUMNS = (
    *("system", "weights", "clients", "tokens/s", "scaling"),
    *("first token s", "99 %", "gap ms", "99 %"),
)
"""The headings; they fit a terminal of 80 characters."""


def show(report: Mapping[str, Any]) -> None:
    """Print the tables, and the reasons of what failed; times are medians and 99th percentiles."""
    rows = report["rows"]
    failures = [
        f"{row['system']}, {row['clients']} clients, {row['num_errors']} of {row['requests']} failed: {reason}"
        for row in rows
        for reason in row["errors"]
    ]
    sections = [PageSection("Many clients (median, 99 %)", COLUMNS, [_cells(row, rows) for row in rows], failures)]
    for part in ("long_prompt", "second_turn"):
        for system, figures in report[part].items():
            cells = [(name.replace("_", " "), _plain(value)) for name, value in figures.items()]
            sections.append(PageSection(f"{part.replace('_', ' ')}: {system}", ("figure", "value"), cells))
    page.show([section for section in sections if section.rows])


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    first_token, gap = row["first_token_s"], row["gap_s"]
    return [
        row["system"],
        row["weights"] or "-",
        str(row["clients"]),
        number(row["tokens_per_s"], 2),
        number(scaling(row, rows), 2),
        *(number(first_token[name], 2) for name in ("median", "p99")),
        *(number(gap[name] and 1000 * gap[name], 0) for name in ("median", "p99")),
    ]


def scaling(row: Row, rows: Sequence[Row]) -> float | None:
    """Return tokens a second as a multiple of the same system's with the fewest clients."""
    fewest = min((each for each in rows if each["system"] == row["system"]), key=lambda each: int(each["clients"]))
    if not row["tokens_per_s"] or not fewest["tokens_per_s"]:
        return None
    return float(row["tokens_per_s"] / fewest["tokens_per_s"])


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number(each, 3)}" for name, each in value.items())
    return number(value, 3) if isinstance(value, float) else str(value)
