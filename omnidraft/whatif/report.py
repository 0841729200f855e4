"""The report of a comparison: tables for the terminal, and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from rich.table import Table

from omnidraft.pictures import picture

INTERVAL = 1.96
"""Standard errors on either side of an interval of 95 %."""


def table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table with a row for each choice."""
    result = Table("drafter", "tokens a pass", "tokens/s", "speed-up", "with 95 %", title="What if")
    for name, row in rows.items():
        low, high = (max(row["speedup"] + sign * INTERVAL * row["speedup_error"], 0.0) for sign in (-1, 1))
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
    """Draw speed-ups with their intervals, the first on top, and the notes below."""
    below = [line for note in notes for line in wrap(note, 110)]
    with picture(path, figsize=(9, 1 + 0.4 * len(rows) + 0.2 * len(below)), layout="tight") as (_, axis):
        speedups = [row["speedup"] for row in rows.values()]
        errors = [min(INTERVAL * row["speedup_error"], row["speedup"]) for row in rows.values()]
        axis.barh(list(rows), speedups, xerr=errors, capsize=3)
        axis.invert_yaxis()
        axis.axvline(1.0, color="black", linewidth=1, linestyle="--")
        axis.set(xlabel="\n".join(["speed-up over plain decoding", *below]))
