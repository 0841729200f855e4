"""The bench of tenants' factors measures every way and writes it down."""

import json
from pathlib import Path

import pytest

from omnidraft.errors import RequestError
from pipelines.bench import tenant_factors
from tests.cli_runs import run_pipeline

TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_memory_and_steps_of_every_rank_and_number_of_texts_are_in_the_report(tmp_path: Path) -> None:
    out = tmp_path / "factors.json"
    options = ("--ranks", "4,8", "--texts", "1,3", "--tenants", "5", "--repeats", "3", "--json", out)
    run_pipeline(tenant_factors.main, *options, "--shape", json.dumps(TINY | HEADS))
    written = json.loads(out.read_text())
    assert [(row["rank"], row["tenants"]) for row in written["memory"]] == [(4, 5), (8, 5)]
    assert [(row["rank"], row["texts"]) for row in written["steps"]] == [(4, 1), (4, 3), (8, 1), (8, 3)]
    assert all(row[f"{name}_ms"] > 0 for row in written["steps"] for name in ("none", "unmerged", "merged"))


@pytest.mark.parametrize("option", ["--ranks", "--texts"])
def test_a_number_that_is_none_is_refused_before_a_drafter_is_made(option: str) -> None:
    with pytest.raises(RequestError, match=f"{option} needs numbers"):
        run_pipeline(tenant_factors.main, option, "1,x")
