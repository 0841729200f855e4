"""The costs of the fleet's memory are measured on files that a worker loads and that another learner makes again."""

import json
from pathlib import Path

import pytest

from pipelines.bench import fleet_memory
from tests.cli_runs import run_pipeline

BYTES_A_TOKEN = 9


@pytest.mark.long
def test_bytes_times_and_the_same_files_after_a_kill_are_in_the_report(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    run_pipeline(fleet_memory.main, "--tokens", "20000", "--tenants", "2", "--json", out)
    written = json.loads(out.read_text())
    assert 8 * 20_000 <= written["bytes"] <= BYTES_A_TOKEN * 20_000
    assert all(written[f"{name}_ms"] > 0 for name in ("built", "published", "swapped"))
    assert written["median_match"] > 1
    assert written["rebuilt"] is True
