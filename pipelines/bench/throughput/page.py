"""The benchmark's output: tables for the terminal, and a picture of tokens a second over clients."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipelines.bench.throughput.rows import Row
from pipelines.lib import pictures

COLUMNS = (
    *("system", "weights", "clients", "tokens/s", "scaling"),
    *("first token s", "99 %", "gap ms", "99 %"),
)
"""The headings; they fit a terminal of 80 characters."""


def show(report: Mapping[str, Any]) -> None:
    """Print the tables, and the reasons of what failed."""
    console = Console()
    if report["rows"]:
        console.print(table(report["rows"]))
    for part in ("long_prompt", "second_turn"):
        for system, figures in report[part].items():
            console.print(_figures_table(f"{part.replace('_', ' ')}: {system}", figures))
    for row in report["rows"]:
        for reason in row["errors"]:
            print(
                f"{row['system']}, {row['clients']} clients, {row['num_errors']} of {row['requests']} failed: {reason}"
            )


def table(rows: Sequence[Row]) -> Table:
    """Return a line for each system and number of clients; times are medians and 99th percentiles."""
    result = Table(title="Many clients (median, 99 %)", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in COLUMNS:
        result.add_column(heading, justify="left" if heading in ("system", "weights") else "right")
    for row in rows:
        first_token, gap = row["first_token_s"], row["gap_s"]
        result.add_row(
            row["system"],
            row["weights"],
            str(row["clients"]),
            _number(row["tokens_per_s"], 2),
            _number(scaling(row, rows), 2),
            *(_number(first_token[name], 2) for name in ("median", "p99")),
            *(_number(gap[name] and 1000 * gap[name], 0) for name in ("median", "p99")),
        )
    return result


def scaling(row: Row, rows: Sequence[Row]) -> float | None:
    """Return tokens a second as a multiple of the same system's with the fewest clients."""
    fewest = min((each for each in rows if each["system"] == row["system"]), key=lambda each: int(each["clients"]))
    if not row["tokens_per_s"] or not fewest["tokens_per_s"]:
        return None
    return float(row["tokens_per_s"] / fewest["tokens_per_s"])


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw tokens a second over the number of clients, a line for each system, as PNG."""
    with pictures.picture(path, figsize=(6.4, 4.0)) as (_, axis):
        for system in dict.fromkeys(row["system"] for row in rows):
            measured = [row for row in rows if row["system"] == system and row["tokens_per_s"]]
            if measured:
                label = f"{system} ({measured[0]['weights']})"
                axis.plot(
                    [row["clients"] for row in measured], [row["tokens_per_s"] for row in measured], "o-", label=label
                )
        clients = sorted({row["clients"] for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(clients, [str(number) for number in clients])
        axis.set_xlabel("clients")
        axis.set_ylabel("tokens/s, all clients together")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()


def _figures_table(title: str, figures: Mapping[str, Any]) -> Table:
    result = Table("figure", "value", title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name, value in figures.items():
        result.add_row(name.replace("_", " "), _plain(value))
    return result


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_number(each, 3)}" for name, each in value.items())
    return _number(value, 3) if isinstance(value, float) else str(value)


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"
