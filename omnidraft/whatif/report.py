"""The report of a comparison: tables for the terminal, and a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from omnidraft.pictures import picture

INTERVAL = 1.96
"""Standard errors on either side of an interval of 95 %."""


def table(rows: Mapping[str, Mapping[str, float]], about: Mapping[str, str]) -> Table:
    """Return a table with a row for each choice, the fastest first."""
    processor, weights = about.get("processor", ""), about.get("weights", "")
    caption = f"Tokens a pass are counted; seconds are those of {weights} on {processor}"
    result = Table("drafter", "tokens a pass", "tokens/s", "speed-up", "with 95 %", title="What if", caption=caption)
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


def draw(rows: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw speed-ups with their intervals as PNG, the fastest on top."""
    ordered = fastest_first(rows)[::-1]
    with picture(path, figsize=(9, 1 + 0.4 * len(rows)), layout="tight") as (_, axis):
        errors = [min(INTERVAL * row["speedup_error"], row["speedup"]) for _, row in ordered]
        axis.barh([name for name, _ in ordered], [row["speedup"] for _, row in ordered], xerr=errors, capsize=3)
        axis.axvline(1.0, color="black", linewidth=1, linestyle="--")
        axis.set(xlabel="speed-up over plain decoding")


def fastest_first(rows: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    """Return the rows by falling speed-up."""
    return sorted(rows.items(), key=lambda each: -each[1]["speedup"])


def _interval(row: Mapping[str, Any]) -> tuple[float, float]:
    half = INTERVAL * row["speedup_error"]
    return max(row["speedup"] - half, 0.0), row["speedup"] + half
