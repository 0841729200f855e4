"""The paper's tables: figures that follow from the answers, with errors over questions, and their page."""

from typing import Any

import pytest

from omnidraft import config
from pipelines.paper_table import TABLES, Row, _decoded


def answer(method: str, prompt: int, num_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "method": method,
        "prompt": prompt,
        "ids": list(range(num_tokens)),
        "num_tokens": num_tokens,
        "num_passes": 5,
        "num_scored": 4,
        "num_agreed": 3,
        "first_token_s": 1.0,
        "decode_s": seconds - 1.0,
    }


def test_a_figure_is_a_ratio_of_sums_with_its_error_over_the_questions() -> None:
    plain = [answer("plain", 0, 11, 11.0), answer("plain", 1, 21, 21.0), answer("plain", 2, 9, 9.0)]
    failed = {"method": "dm", "prompt": 2, "failure": "IndexError: no"}
    row = _decoded([*plain, answer("dm", 0, 11, 8.0), answer("dm", 1, 21, 8.0), failed], "dm")
    assert row["speedup"] == [pytest.approx(32 / 16), pytest.approx((2 * (5**2 + 5**2)) ** 0.5 / 16)]
    assert row["tokens_per_pass"][0] == pytest.approx(32 / 10)
    assert row["agreement"] == [0.75, 0.0]
    assert (row["same_texts"], row["num_texts"]) == (2, 2)
    assert _decoded([plain[0], answer("dm", 0, 11, 8.0)], "dm")["speedup"][1] is None


def test_every_row_is_of_settings_that_there_are() -> None:
    for table in TABLES.values():
        for row in table.values():
            assert isinstance(row, Row)
            config.load(None, {}, learner=row.learner or {}, cache=row.cache, decode=row.decode or {})
