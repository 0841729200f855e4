"""What the pipelines promise: reports on disk."""

import json
from pathlib import Path

from pipelines.lib import report

ROW = {
    "agreement": 0.5,
    "tokens_per_pass": 2.0,
    "tokens_per_s": 20.0,
    "plain_tokens_per_s": 10.0,
    "speedup": 2.0,
}


def test_a_report_is_a_table_a_picture_and_a_file(tmp_path: Path) -> None:
    rows = [ROW | {"version": None}, ROW | {"version": 1}]
    assert report.table(rows).row_count == 2
    report.picture(rows, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    report.save({"rows": rows}, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == {"rows": rows}
