"""The report of a run of the demo: a table for the terminal, a picture, a JSON file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row for each snapshot."""
    result = Table(
        "snapshot",
        "agreement",
        "tokens per target pass",
        "tokens/s",
        "plain tokens/s",
        "speed-up",
        title="On held-out questions",
    )
    for row in rows:
        result.add_row(
            f"version {row['version']}",
            f"{row['agreement']:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}x",
        )
    return result


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw agreement, tokens per pass and speed-up over the snapshots, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"version {row['version']}" for row in rows]
    panels = {"agreement": "agreement", "tokens_per_pass": "tokens per target pass", "speedup": "speed-up over plain"}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 3.4))
    for axis, (field, title) in zip(axes, panels.items(), strict=True):
        bars = axis.bar(names, [row[field] for row in rows], color="#3b6ea5")
        axis.bar_label(bars, fmt="%.2f")
        axis.set_title(title)
        axis.margins(y=0.15)
    axes[-1].axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axes[-1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def save(report: dict[str, Any], path: Path) -> None:
    """Write indented JSON, aside first: an interrupted run leaves the last complete report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(path)
