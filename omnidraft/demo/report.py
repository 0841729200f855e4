"""The report of a run of the demo: tables for the terminal, and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from omnidraft import pictures
from omnidraft.demo.curve import CHAIN, CurvePoint

COLOR = "#3b6ea5"
BAR_PER_AGREEMENT = 60
"""Signs of a bar for each unit of agreement."""


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


def curve_table(points: Sequence[CurvePoint]) -> Table:
    """Return a learning curve, with a bar for each snapshot that grows from the lowest agreement."""
    title = f"On {points[-1].num_positions:,} held-out positions; tokens a pass would be those of chains of {CHAIN}"
    result = Table("", "learned", "agreement", "gain", "tokens a pass", "", title=title)
    lowest = min(point.agreement for point in points)
    for point in points:
        result.add_row(
            f"version {point.version}",
            f"{point.num_tokens:,}",
            f"{point.agreement:.3f}",
            f"{point.gain:+.3f} ± {point.gain_error:.3f}" if point.num_tokens else "",
            f"{point.predicted_tokens_per_pass:.2f}",
            f"[green]{'█' * (1 + round((point.agreement - lowest) * BAR_PER_AGREEMENT))}[/green]",
        )
    return result


def picture(
    points: Sequence[CurvePoint], rows: Sequence[dict[str, Any]], path: Path, moved: tuple[float, float] | None
) -> None:
    """Draw the learning curve, and measured tokens per pass and speed-up of the snapshots, as PNG.

    Args:
        moved: as in `table`.
    """
    panels = {"tokens_per_pass": "tokens per target pass", "speedup": "speed-up over plain"}
    sizes = {"ncols": 1 + len(panels), "figsize": (12, 3.6), "width_ratios": [1.6, 1, 1], "layout": "tight"}
    with pictures.picture(path, **sizes) as (_, (curve, *bars)):
        agreements = [point.agreement for point in points]
        errors = [point.gain_error for point in points]
        curve.errorbar(
            [point.num_tokens for point in points], agreements, yerr=errors, marker="o", capsize=4, color=COLOR
        )
        curve.set_title(f"agreement on {points[-1].num_positions:,} held-out positions")
        curve.set_xlabel("tokens learned; bars: standard error of the gain")
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
