"""Write the table of docs/models.md from what `make test-models` saw: `python -m tests.models.page`."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "runs" / "models"
BEGIN, END = "<!-- families:", "<!-- end of families -->"
_HEAD = """\
| family | `model_type` | computed by | drafted for | modes | learns as drafter | why not our kernels |
| --- | --- | --- | --- | --- | --- | --- |"""


def table(rows: list[dict[str, Any]]) -> str:
    """The families by what computes them, and by name."""
    ordered = sorted(rows, key=lambda row: (row["computed_by"], row["family"].lower()))
    return "\n".join([_HEAD, *map(_line, ordered)])


def _line(row: dict[str, Any]) -> str:
    modes, learns = ", ".join(row["modes"]), ", ".join(row["learns"])
    cells = (f"`{row['model_type']}`", row["computed_by"], row["drafts"], modes, learns, row["because"] or "")
    return f"| {row['family']} | {' | '.join(cells)} |"


def page(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with a table of these rows."""
    head, rest = text.split(BEGIN)
    comment, rest = rest.split("\n", 1)
    return f"{head}{BEGIN}{comment}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    seen = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    PAGE.write_text(page(PAGE.read_text(), seen))
