"""docs/scaling.md: its table is the one that the script prints."""

from pathlib import Path

import pytest

from omnidraft.errors import RequestError
from pipelines import scaling
from tests.cli_runs import run_pipeline

PAGE = Path(__file__).parents[3] / "docs/scaling.md"


def test_the_page_shows_the_table_that_the_script_prints(tmp_path: Path) -> None:
    copy = tmp_path / "scaling.md"
    copy.write_text(PAGE.read_text())
    run_pipeline(scaling.main, "--markdown", copy)
    assert copy.read_text() == PAGE.read_text()


def test_a_number_of_workers_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="--workers needs numbers"):
        run_pipeline(scaling.main, "--workers", "10,x")
