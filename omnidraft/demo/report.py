"""The report of a run of the demo: tables for the terminal, and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from omnidraft import pictures
from omnidraft.snapshots.manifest import Manifest

COLOR = "#3b6ea5"


def table(rows: Sequence[dict[str, Any]], moved: tuple[float, float] | None = None) -> Table:
    """Return a table with a row for each snapshot.

    Args:
        moved: the tokens per second between which plain decoding moved, if it did.
    """
    result = Table(
        "snapshot",
        "agreement",
        "tokens per target pass",
        "tokens/s",
        "plain tokens/s",
        "speed-up",
        title="On held-out questions; speed-up: the median, and where it lies with 90 %",
        caption=moved
        and f"This machine's own speed moved: plain decoding ran at {moved[0]:.1f} to {moved[1]:.1f} tokens/s.",
    )
    for row in rows:
        result.add_row(
            f"version {row['version']}",
            f"{row['agreement']:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['plain_tokens_per_s']:.1f}",
            speedup_text(row),
        )
    return result


def speedup_text(row: Mapping[str, Any]) -> str:
    """Return a row's speed-up with its interval, where there is one."""
    interval = row["speedup_interval"]
    return f"{row['speedup']:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def curve_points(curve: Sequence[Manifest]) -> list[tuple[int, float, float]]:
    """Return the tokens learned, the held-out agreement and the standard error of its change, of the parent of the
    first snapshot and of each snapshot, as the distiller measured them."""
    points = [(0, curve[0].agreement_before or 0.0, 0.0)]
    return points + [
        (each.num_tokens, each.agreement_after or 0.0, each.agreement_change_error or 0.0) for each in curve
    ]


def curve_table(curve: Sequence[Manifest]) -> Table:
    """Return a learning curve, with a row for each version."""
    title = f"On {curve[-1].held_out_records} held-out answers, which nobody learns from"
    result, points = Table("", "learned", "agreement", "change", title=title), curve_points(curve)
    for number, (num_tokens, agreement, error) in enumerate(points):
        change = f"{agreement - points[number - 1][1]:+.3f} ± {error:.3f}" if number else ""
        result.add_row(f"version {1 + number}", f"{num_tokens:,}", f"{agreement:.3f}", change)
    return result


def picture(
    snapshots: Sequence[Manifest], rows: Sequence[dict[str, Any]], path: Path, moved: tuple[float, float] | None
) -> None:
    """Draw the learning curve, and measured tokens per pass and speed-up of the snapshots, as PNG.

    Args:
        moved: as in `table`.
    """
    panels = {"tokens_per_pass": "tokens per target pass", "speedup": "speed-up over plain"}
    sizes = {"ncols": 1 + len(panels), "figsize": (12, 3.6), "width_ratios": [1.6, 1, 1], "layout": "tight"}
    with pictures.picture(path, **sizes) as (_, (curve, *bars)):
        num_tokens, agreements, errors = zip(*curve_points(snapshots), strict=True)
        curve.errorbar(num_tokens, agreements, yerr=errors, marker="o", capsize=4, color=COLOR)
        curve.set_title(f"agreement on {snapshots[-1].held_out_records} held-out answers")
        curve.set_xlabel("tokens learned; bars: standard error of the change")
        curve.locator_params(axis="x", nbins=6)
        curve.grid(alpha=0.3)
        for axis, (field, title) in zip(bars, panels.items(), strict=True):
            axis.bar(
                [f"version {row['version']}: {row[field]:.2f}" for row in rows],
                [row[field] for row in rows],
                color=COLOR,
            )
            axis.set_title(title)
            axis.margins(y=0.15)
        for place, row in enumerate(rows):
            if row["speedup_interval"]:
                bars[-1].vlines(place, *row["speedup_interval"], color="black")
        if moved:
            bars[-1].set_xlabel(f"plain itself moved: {moved[0]:.1f} to {moved[1]:.1f} tokens/s")
        bars[-1].axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
        bars[-1].legend(loc="upper left")
