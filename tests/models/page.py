"""Write the table of docs/models.md from what `make test-models` saw: `python -m tests.models.page`."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "runs" / "models"
BEGIN, END = "<!-- families:", "<!-- end of families -->"
_HEAD = "| family | `model_type` | computed by | modes | learns as drafter |\n| --- | --- | --- | --- | --- |"


def table(rows: list[dict[str, Any]]) -> str:
    """The families by what computes them, and by name."""
    ordered = sorted(rows, key=lambda row: (row["computed_by"], row["family"].lower()))
    return "\n".join([_HEAD, *map(_line, ordered)])


def _line(row: dict[str, Any]) -> str:
    computed_by = f"{row['computed_by']}: {row['because']}" if row["because"] else row["computed_by"]
    cells = (row["family"], f"`{row['model_type']}`", computed_by, ", ".join(row["modes"]), ", ".join(row["learns"]))
    return f"| {' | '.join(cells)} |"


def families_of(page: str) -> list[str]:
    """The families that a page has a row for."""
    lines = page.split(BEGIN)[1].split(END)[0].splitlines()
    return [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:]


def page(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with a table of these rows."""
    head, rest = text.split(BEGIN)
    comment, rest = rest.split("\n", 1)
    return f"{head}{BEGIN}{comment}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    seen = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    PAGE.write_text(page(PAGE.read_text(), seen))
