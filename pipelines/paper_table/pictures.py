"""The picture of the paper's table: acceptance and speed-up of every method, with standard errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.lib.pictures import picture
from pipelines.paper_table.decoding import PLAIN
from pipelines.paper_table.figures import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {"acceptance": "accepted share of drafted tokens", "speedup": "speed-up over plain decoding"}


def draw(table: Mapping[str, Mapping[str, Row]], path: Path) -> None:
    """Draw a panel for each figure, with a group of bars for each target and task, as PNG."""
    methods = [name for name in dict.fromkeys(name for rows in table.values() for name in rows) if name != PLAIN]
    with picture(path, nrows=len(PANELS), figsize=(max(8.0, 2.6 * len(table)), 7.0)) as (_, axes):
        for axis, (field, title) in zip(axes, PANELS.items(), strict=True):
            _bars(axis, table, methods, field)
            axis.set_xticks(range(len(table)), [name.replace("/", "\n") for name in table], fontsize=8)
            axis.set_ylabel(title)
        axes[-1].axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
        axes[-1].legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _bars(axis: "Axes", table: Mapping[str, Mapping[str, Row]], methods: list[str], field: str) -> None:
    """Draw one bar for each method in each group; nothing where a figure is unknown."""
    width = 0.8 / max(len(methods), 1)
    for number, method in enumerate(methods):
        rows = [rows.get(method, {}) for rows in table.values()]
        positions = [group + width * (number - (len(methods) - 1) / 2) for group in range(len(table))]
        heights, errors = ([row.get(name) or 0.0 for row in rows] for name in (field, f"{field}_error"))
        axis.bar(positions, heights, width, yerr=errors, error_kw={"linewidth": 1}, label=method)
