"""The vLLM benchmark's report follows from what clients measured; the servers themselves are tests/vllm's business."""

from pathlib import Path

import pytest

from omnidraft.cli.choices import chosen
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import ModelError, RequestError
from pipelines import bench_vllm
from pipelines.bench.runs import BenchRun, Failure
from pipelines.lib.vllm_methods import NAMES, PLAIN
from pipelines.lib.vllm_server import custom_class, serve
from tests.cli_runs import run_pipeline


def run_of(decode_s: float, num_tokens: int = 11, num_passes: int = 11) -> BenchRun:
    ids = tuple(range(num_tokens))
    return BenchRun(
        ids, DecodeStats(num_tokens, num_passes, num_later_tokens=num_tokens - 1, first_token_s=0.5, decode_s=decode_s)
    )


def test_every_row_is_compared_with_plain_vllm_at_the_same_time():
    """Plain is twice as slow beside the second method, whose speed-up is over that turn and not over the first."""
    outcomes = {
        "vllm-tli": {"gsm8k": {"vllm": [run_of(1.0)], "vllm-tli": [run_of(1.25, num_passes=6)]}},
        "vllm+omnidraft": {"gsm8k": {"vllm": [run_of(2.0)], "vllm+omnidraft": [run_of(1.0, num_passes=4)]}},
    }
    made = bench_vllm._report(["gsm8k"], outcomes)
    rows = {row["method"]: row for row in made["rows"]}
    assert list(rows) == ["vllm", "vllm-tli", "vllm+omnidraft"]
    assert rows["vllm"]["tokens_per_s"] == pytest.approx(10.0)
    assert rows["vllm-tli"]["speedup"] == pytest.approx(0.8)
    assert rows["vllm+omnidraft"]["speedup"] == pytest.approx(2.0)
    assert rows["vllm+omnidraft"]["share_identical_to_plain"] == 1.0
    assert [(run["method"], run["beside"]) for run in made["runs"]] == [
        *(("vllm", "vllm-tli"), ("vllm-tli", "vllm-tli")),
        *(("vllm", "vllm+omnidraft"), ("vllm+omnidraft", "vllm+omnidraft")),
    ]


def test_a_row_whose_server_does_not_start_says_why():
    outcomes = {"vllm-tli": {"gsm8k": {"vllm": [run_of(1.0)], "vllm-tli": [Failure("no such option")]}}}
    rows = bench_vllm._report(["gsm8k"], outcomes)["rows"]
    assert [(row["method"], row["failures"]) for row in rows] == [("vllm", []), ("vllm-tli", ["no such option"])]


def test_plain_comes_first_and_cannot_be_left_out():
    assert chosen("vllm+omnidraft, vllm", NAMES, "method", baseline=PLAIN) == ["vllm", "vllm+omnidraft"]
    with pytest.raises(RequestError, match="--methods needs vllm"):
        chosen("vllm+omnidraft", NAMES, "method", baseline=PLAIN)
    with pytest.raises(RequestError, match="no method 'plain'"):
        chosen("vllm,plain", NAMES, "method", baseline=PLAIN)


def test_no_server_has_a_prompt_in_its_cache_that_another_row_was_measured_on(
    tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    """A script stands where a virtual environment has its Python, and writes down how each server is started."""
    (tmp_path / "bin").mkdir()
    python, prompts = tmp_path / "bin" / "python", tmp_path / "prompts.jsonl"
    python.write_text('#!/bin/sh\necho "$@" >> "$0.started"; exit 3\n')
    python.chmod(0o755)
    prompts.write_text('{"prompt": "Name a river."}\n')
    asked = ("--venv", tmp_path, "--prompts", prompts, "--methods", "vllm,vllm-ngram", "--target", tiny_models[0])
    run_pipeline(bench_vllm.main, *asked)
    started = python.with_name("python.started").read_text().splitlines()
    assert ["--no-enable-prefix-caching" in line.split() for line in started] == [True, True]


def test_a_server_that_ends_at_once_is_told_with_the_end_of_its_log(tmp_path):
    """A script stands where a virtual environment has its Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho out of luck; exit 3\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    options = {"speculation": custom_class(3)}
    with pytest.raises(ModelError, match="out of luck"), serve(tmp_path, tmp_path, tmp_path / "vllm.log", **options):
        pass
