"""The benchmark's output: a table per task, a page in Markdown, a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipelines.bench.methods import BASELINES
from pipelines.bench.summary import Row
from pipelines.lib import pictures

COLUMNS: Mapping[str, str] = {
    "method": "method",
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up",
    "speedup_over_baseline": "own engine",
    "speedup_of_requests": "whole request",
    "tokens_per_pass": "per pass",
    "draft_share": "drafting",
    "overhead_share": "overhead",
    "share_identical_to_baseline": "same text",
    "failed_prompts": "failed",
}
"""Field of a row -> heading of its column."""


def show(report: Mapping[str, Any], markdown_path: Path | None) -> None:
    """Print the tables; write the page, with its picture beside it, when there is a path."""
    rows = report["rows"]
    for task in dict.fromkeys(row["task"] for row in rows):
        Console().print(table(task, [row for row in rows if row["task"] == task]))
    for row in rows:
        for reason in row["failures"]:
            print(f"{row['task']}: {row['method']} failed: {reason}")
    if markdown_path is not None:
        picture_path = markdown_path.with_suffix(".png")
        picture(rows, picture_path)
        markdown_path.write_text(markdown(report, picture_path.name))


def table(task: str, task_rows: Sequence[Row]) -> Table:
    """Return a task's table for the terminal."""
    result = Table(title=task, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in COLUMNS.values():
        result.add_column(heading, no_wrap=heading == "method", overflow="fold")
    for row in task_rows:
        result.add_row(*(_cell(column, row) for column in COLUMNS))
    return result


def _cell(column: str, row: Row) -> str:
    value = row[column]
    if value is None or (column == "speedup_over_baseline" and row["baseline"] == "plain"):
        return "-"
    if "share" in column:
        return f"{100 * value:.1f}%"
    if column.startswith("speedup"):
        return f"{value:.2f}x"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


LEGEND = (
    "Speed-up: over plain, the median over prompts of the ratio on the same prompt. Own engine: the same over "
    + ", ".join(f"{base} for {name}" for name, base in BASELINES.items())
    + ". Whole request: that with the first pass, so with both models' reading of the prompt. Per pass: emitted tokens "
    "per pass of the target. Drafting and overhead: shares of the decoding time; overhead is all that is neither "
    "drafter nor target. Same text: share of answers that are, token by token, those of plain or of the method's own "
    "engine; passes of other widths round otherwise, so only reproducible mode promises all. Failed: prompts that the "
    "method crashed on."
)


def markdown(report: Mapping[str, Any], picture_name: str) -> str:
    """Return the page: models, machine, a table per task, and failures with their reasons."""
    machine, options = report["machine"], report["options"]
    models, mode = report["settings"]["models"], report["settings"]["decode"]["mode"]
    lines = [
        "# Benchmarks",
        "",
        f"Target {models['target']}, drafter {models['drafter']}, snapshot {options['snapshot'] or 'none'}, "
        f"temperature {options['temperature']}, {options['max_new_tokens']} tokens at most, mode {mode}.",
        f"Precision, width and threads of the target: `{options['fingerprint']}`; drafter "
        f"`{models['drafter_precision']}`.",
        "All methods in one process on the same prompts, in turn; medians over prompts, the first pass left out.",
        "",
        LEGEND,
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
        f"![Speed-up over plain decoding]({picture_name})",
    ]
    for task in dict.fromkeys(row["task"] for row in report["rows"]):
        lines += ["", *_section(task, [row for row in report["rows"] if row["task"] == task], options)]
    lines += ["", f"Made by `{options['command']}`.", ""]
    return "\n".join(lines)


def _section(task: str, task_rows: Sequence[Row], options: Mapping[str, Any]) -> list[str]:
    lines = [
        f"## {task} ({options['num_prompts'][task]} prompts)",
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(_cell(column, row) for column in COLUMNS) + " |" for row in task_rows),
    ]
    failed = [f"- {row['method']}: {reason}" for row in task_rows for reason in row["failures"]]
    return [*lines, "", "Failures:", "", *failed] if failed else lines


def picture(all_rows: Sequence[Row], path: Path) -> None:
    """Draw bars of the speed-up over plain decoding, a group per task, as PNG."""
    tasks = list(dict.fromkeys(row["task"] for row in all_rows))
    methods = [name for name in dict.fromkeys(row["method"] for row in all_rows) if name != "plain"]
    speedups = {(row["task"], row["method"]): row["speedup"] or 0.0 for row in all_rows}
    width = 0.8 / max(len(methods), 1)
    with pictures.picture(path, figsize=(max(6.0, 0.5 * len(tasks) * (len(methods) + 1)), 4.0)) as (_, axis):
        for number, name in enumerate(methods):
            positions = [group + width * (number - (len(methods) - 1) / 2) for group in range(len(tasks))]
            bars = axis.bar(positions, [speedups[task, name] for task in tasks], width, label=name)
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
        axis.axhline(1.0, color="black", linewidth=1, linestyle="--", label="plain decoding")
        axis.set_xticks(range(len(tasks)), tasks)
        axis.set_ylabel("speed-up over plain decoding")
        axis.margins(y=0.15)
        axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
