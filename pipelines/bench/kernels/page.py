"""The benchmark's output: a table of milliseconds, a page in Markdown, a picture."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnidraft import pictures
from pipelines.bench.kernels.engine import MAX_ROWS
from pipelines.bench.kernels.measurement import Row
from pipelines.lib import page
from pipelines.lib.page import PageSection

_MOST_BITS = 16
LEGEND = (
    "Milliseconds of a whole pass over so many rows with the logits of all, medians; an empty text, so reading the "
    f"weights is most of the work. More than {MAX_ROWS} rows: a prompt of so many tokens, read in passes of the "
    "system's own size. GB/s: the bytes of the matrices over the time of a pass of one row."
)


def show(report: Mapping[str, Any], markdown_path: Path | None) -> None:
    """Print the table; write the page, with its picture beside it, when there is a path."""
    rows = report["rows"]
    section = PageSection("ms of a pass", _headings(rows), _lines(rows), _failures(rows))
    page.show([section])
    if markdown_path is not None:
        picture_path = markdown_path.with_suffix(".png")
        picture(rows, report["limits"], picture_path)
        markdown_path.write_text(page.markdown("Passes", _about(report, picture_path.name), [section]))


def _about(report: Mapping[str, Any], picture_name: str) -> list[str]:
    """Return what was measured, the machine and its limits, and the picture."""
    facts = [f"- {name}: {value}" for part in ("machine", "limits") for name, value in report[part].items()]
    measured = f"Target {report['options']['target']}, by `{report['options']['command']}`."
    return [measured, LEGEND, "\n".join(facts), f"![Milliseconds of a pass]({picture_name})"]


def _failures(rows: Sequence[Row]) -> list[str]:
    return [f"{_name(row)}: {row['error']}" for row in rows if row["error"]]


def picture(rows: Sequence[Row], limits: Mapping[str, Any], path: Path) -> None:
    """Draw milliseconds of a pass over its rows as PNG: a panel for each number of bits, a line for each engine."""
    drawn = [row for row in rows if row["ms"] and row["rows"] <= MAX_ROWS]
    panels = sorted({_bits(row) for row in drawn}, reverse=True)
    num = max(len(panels), 1)
    with pictures.picture(path, ncols=num, figsize=(4.5 * num, 4.5), sharey=True, squeeze=False) as (figure, axes):
        for bits, axis in zip(panels, axes[0], strict=False):
            for name, measured in _by_engine([row for row in drawn if _bits(row) == bits]).items():
                style = "o-" if measured[0]["system"] == "omnidraft" else "s--"
                axis.plot([row["rows"] for row in measured], [row["ms"] for row in measured], style, label=name)
            numbers = _numbers(drawn)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(numbers, [str(number) for number in numbers])
            axis.set_xlabel("rows of a pass")
            axis.set_title(f"{bits} bits" if bits < _MOST_BITS else f"{bits} bits or more", fontsize=9)
            axis.grid(alpha=0.3, which="both")
            axis.legend(fontsize=7)
        axes[0][0].set_ylabel("ms")
        figure.suptitle(f"reading alone: {limits.get('read_gb_per_s')} GB/s", fontsize=9)


def _bits(row: Row) -> int:
    """Return the bits of a weight, from the format's name; wider ones count as 16."""
    number = re.search(r"\d+", row["format"])
    return _MOST_BITS if number is None else min(int(number.group()), _MOST_BITS)


def _name(row: Row) -> str:
    return f"{row['system']} {row['format']} {row['variant']}"


def _numbers(rows: Sequence[Row]) -> list[int]:
    return sorted({row["rows"] for row in rows if row["rows"] is not None})


def _by_engine(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if _name(row) == name] for name in dict.fromkeys(map(_name, rows))}


def _headings(rows: Sequence[Row]) -> list[str]:
    return ["system", "format", "variant", *map(str, _numbers(rows)), "GB/s"]


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for measured in _by_engine(rows).values():
        times = {row["rows"]: row["ms"] for row in measured}
        bandwidth = next((row["gb_per_s"] for row in measured if row["rows"] == 1), None)
        cells = [times.get(number) for number in _numbers(rows)]
        names = [measured[0][name] for name in ("system", "format", "variant")]
        lines.append([*names, *("-" if cell is None else f"{cell:.0f}" for cell in cells), f"{bandwidth or '-'}"])
    return lines
