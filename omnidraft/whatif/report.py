"""The report of a comparison: tables for the terminal, and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.table import Table

from omnidraft.pictures import picture

INTERVAL = 1.96
"""Standard errors on either side of an interval of 95 %."""


def machine(about: Mapping[str, str]) -> str:
    """Return of what machine the seconds are."""
    processor, weights = about.get("processor", ""), about.get("weights", "")
    return f"Tokens a pass are counted; seconds are those of {weights} on {processor}"


def table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table with a row for each choice, the fastest first."""
    result = Table("drafter", "tokens a pass", "tokens/s", "speed-up", "with 95 %", title="What if")
    for name, row in fastest_first(rows):
        low, high = _interval(row)
        figures = (f"{row['tokens_per_pass']:.2f}", f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}x")
        result.add_row(name, *figures, f"{low:.2f} to {high:.2f}")
    return result


def best_table(best: Mapping[tuple[str, str], tuple[str, float, int]]) -> Table:
    """Return a table with the fastest choice for each tenant and kind of work."""
    result = Table("tenant", "work", "answers", "fastest", "speed-up")
    for (tenant, work), (name, speedup, num) in best.items():
        result.add_row(tenant, work, str(num), name, f"{speedup:.2f}x")
    return result


def draw(rows: Mapping[str, Mapping[str, float]], notes: Sequence[str], path: Path) -> None:
    """Draw speed-ups with their intervals, the fastest on top, and the notes below."""
    ordered, below = fastest_first(rows)[::-1], [line for note in notes for line in wrap(note, 110)]
    with picture(path, figsize=(9, 1 + 0.4 * len(rows) + 0.2 * len(below)), layout="tight") as (_, axis):
        errors = [min(INTERVAL * row["speedup_error"], row["speedup"]) for _, row in ordered]
        axis.barh([name for name, _ in ordered], [row["speedup"] for _, row in ordered], xerr=errors, capsize=3)
        axis.axvline(1.0, color="black", linewidth=1, linestyle="--")
        axis.set(xlabel="\n".join(["speed-up over plain decoding", *below]))


def fastest_first(rows: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    """Return the rows by falling speed-up."""
    return sorted(rows.items(), key=lambda each: -each[1]["speedup"])


def _interval(row: Mapping[str, Any]) -> tuple[float, float]:
    half = INTERVAL * row["speedup_error"]
    return max(row["speedup"] - half, 0.0), row["speedup"] + half
