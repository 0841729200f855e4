"""The page and the pictures of the paper's tables, from the cells computed so far."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.lib import machine

PAGE = "paper_table.md"

Cells = Mapping[str, Any]

LEGEND = (
    "Acceptance: accepted share of all drafted tokens, siblings included (trees draft more than they hope to keep). "
    "Agreement: share of scored positions whose first candidate the target drew. Speed-up: over plain decoding of the "
    "same engine in the same run, median over prompts. `dm-untrained`: the drafter as it comes, direct tokens; `dm`: "
    "after learning with L_DM; `dm+ngram`: with 0.2 L_ngram and the n-gram cache; `alm`: with 0.2 ALM in its place."
)

OFFLINE = (
    "Share of the positions of the target's own answers to the test prompts where the drafter's first candidate is the "
    "emitted token, before and after learning; nothing is decoded, so it has no noise of the clock."
)


def write(content: Mapping[str, Any], out: Path) -> None:
    """Write Markdown and PNG files into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    cells: Cells = content["cells"]
    lines = ["# The paper's tables", "", f"Options: `{content['options']['plan']}`.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.describe().items()]
    offline = {name.removeprefix("offline/"): rows for name, rows in cells.items() if name.startswith("offline/")}
    table = {name.removeprefix("table/"): rows for name, rows in cells.items() if name.startswith("table/")}
    if table:
        lines += ["", "## Methods", "", LEGEND, "", "![Speed-up](speedup.png)", "", *_methods(table)]
        _bars(table, out / "speedup.png")
    if offline:
        lines += ["## Agreement on the test answers", "", OFFLINE, "", *_offline(offline)]
    ranks = {name.removeprefix("lora/"): row for name, row in cells.items() if name.startswith("lora/")}
    if ranks:
        lines += ["", "## LoRA rank", "", "Predicted offline, on the test answers.", "", *_ranks(ranks)]
    if "cache" in cells:
        lines += ["", "## The n-gram cache", "", *_caches(cells["cache"])]
    if "adaptive" in cells:
        lines += ["", "## Adaptive drafting", "", *_decoded(cells["adaptive"], "policy")]
    (out / PAGE).write_text("\n".join([*lines, ""]))


def _methods(table: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, rows in table.items():
        target, _, task = name.rpartition("/")
        lines += [f"### {task}, {target}", "", *_decoded(rows, "method"), ""]
    return lines


def _offline(rows: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    methods = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [(name, *(_number(row.get(method), digits=3) for method in methods)) for name, row in rows.items()]
    return _markdown(("target and task", *methods), cells)


def _decoded(rows: Mapping[str, Mapping[str, Any]], first: str) -> list[str]:
    return _markdown(
        (first, "acceptance", "agreement", "tokens per pass", "speed-up", "texts as plain"),
        [
            (
                name,
                _number(row["acceptance"]),
                _number(row["agreement"]),
                _number(row["tokens_per_pass"]),
                _number(row["speedup"], "x"),
                f"{row['same_texts']} of {row['num_texts']}",
            )
            for name, row in rows.items()
        ],
    )


def _ranks(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    depths = list(next(iter(rows.values()))["tokens_per_pass"])
    return _markdown(
        ("rank", "agreement before", "after", *(f"chain of {depth}" for depth in depths), "tokens learned/s"),
        [
            (
                name,
                f"{row['agreement_before']:.3f}",
                f"{row['agreement']:.3f}",
                *(_number(value) for value in row["tokens_per_pass"].values()),
                f"{row['tokens_per_s']:.0f}",
            )
            for name, row in rows.items()
        ],
    )


def _caches(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return _markdown(
        ("cache", "entries", "bytes an entry", "kB", "hit rate", "lookup, us", "agreement", "chain of 8"),
        [
            (
                name,
                str(row["entries"]),
                str(row["bytes_per_entry"]),
                f"{row['bytes'] / 1000:.1f}",
                _number(row["hit_rate"]),
                _number(row["lookup_us"]),
                f"{row['agreement']:.3f}",
                _number(row["tokens_per_pass"].get("8", row["tokens_per_pass"].get(8))),
            )
            for name, row in rows.items()
        ],
    )


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _bars(table: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = [name for name in next(iter(table.values())) if name != "plain"]
    figure, axis = pyplot.subplots(figsize=(max(6.0, 2.2 * len(table)), 4.0))
    width = 0.8 / max(len(methods), 1)
    for number, method in enumerate(methods):
        positions = [group + width * (number - (len(methods) - 1) / 2) for group in range(len(table))]
        bars = axis.bar(positions, [rows[method]["speedup"] or 0.0 for rows in table.values()], width, label=method)
        axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axis.set_xticks(range(len(table)), [name.replace("/", "\n") for name in table], fontsize=8)
    axis.set_ylabel("speed-up over plain decoding")
    axis.margins(y=0.15)
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
