"""The benchmark's tables, one for each task, and its page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.bench.methods import BASELINES
from pipelines.bench.summary import Row
from pipelines.lib import page
from pipelines.lib.page import PageSection, number

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

LEGEND = (
    "Speed-up: over plain, the median over prompts of the ratio on the same prompt. Own engine: the same over "
    + ", ".join(f"{base} for {name}" for name, base in BASELINES.items())
    + ". Whole request: that with the first pass, so with both models' reading of the prompt. Per pass: emitted tokens "
    "per pass of the target. Drafting and overhead: shares of the decoding time; overhead is all that is neither "
    "drafter nor target. Same text: share of answers that are, token by token, those of plain or of the method's own "
    "engine; passes of other widths round otherwise, so only reproducible mode promises all. Failed: prompts that the "
    "method crashed on."
)


def show(report: Mapping[str, Any], markdown_path: Path | None) -> None:
    """Print the tables; write the page when there is a path."""
    sections = [_section(task, num, report["rows"]) for task, num in report["options"]["num_prompts"].items()]
    page.show(sections)
    if markdown_path is not None:
        markdown_path.parent.mkdir(parents=True, exist_ok=True)
        markdown_path.write_text(page.markdown("Benchmarks", _about(report), sections))


def _section(task: str, num_prompts: int, rows: list[Row]) -> PageSection:
    of_task = [row for row in rows if row["task"] == task]
    failures = [f"{row['method']} failed: {reason}" for row in of_task for reason in row["failures"]]
    cells = [[_cell(column, row) for column in COLUMNS] for row in of_task]
    return PageSection(f"{task} ({num_prompts} prompts)", list(COLUMNS.values()), cells, failures)


def _cell(column: str, row: Row) -> str:
    value = row[column]
    if value is None or (column == "speedup_over_baseline" and row["baseline"] == "plain"):
        return "-"
    if "share" in column:
        return f"{100 * value:.1f}%"
    if column.startswith("speedup"):
        return f"{value:.2f}x"
    return number(value, 2) if isinstance(value, float) else str(value)


def _about(report: Mapping[str, Any]) -> list[str]:
    options, models = report["options"], report["settings"]["models"]
    return [
        f"Target {models['target']}, drafter {models['drafter']} ({models['drafter_precision']}), snapshot "
        f"{options['snapshot'] or 'none'}, temperature {options['temperature']}, {options['max_new_tokens']} tokens at "
        f"most, mode {report['settings']['decode']['mode']}. Precision, width and threads of the target: "
        f"`{options['fingerprint']}`.",
        "All methods on the same prompts, in turn; medians over prompts, the first pass left out.",
        LEGEND,
        "\n".join(f"- {name}: {value}" for name, value in report["machine"].items()),
        f"Made by `{options['command']}`.",
    ]
