"""The bench of structured output measures all three methods on the same texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import ContractError, RequestError
from pipelines import constrained
from tests.cli_runs import run_pipeline

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["tide", "moon"]}, "is_high": {"type": "boolean"}},
    "required": ["name", "is_high"],
    "additionalProperties": False,
}
SETTINGS = """
[models]
precision = "float32"
drafter_precision = "float32"
[decode]
mode = "fast"
policy = "fixed"
num_draft_tokens = 5
threads = 1
"""


@pytest.fixture
def asked(tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path) -> tuple[object, ...]:
    """The command's options, with a file of two questions."""
    prompts, settings = tmp_path / "prompts.jsonl", tmp_path / "tiny.toml"
    rows = [{"prompt": f"Is the {each} high?", "schema": SCHEMA} for each in ("tide", "moon")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings.write_text(SETTINGS)
    target, drafter = tiny_models
    models = ("--target", target, "--drafter", drafter, "--config", settings)
    return (*models, "--prompts", prompts, "--max-new-tokens", 24, "--json", tmp_path / "constrained.json")


def test_the_report_has_the_same_texts_of_a_drafter_that_is_aware_and_one_that_is_not(
    asked: tuple[object, ...], tmp_path: Path
) -> None:
    run_pipeline(constrained.main, *asked, "--num-prompts", 1)
    written = json.loads((tmp_path / "constrained.json").read_text())
    assert (written["prompts"], written["mode"], written["max_new_tokens"]) == (1, "fast", 24)
    assert written["settings"]["models"]["target"] == str(asked[1])
    assert "commit" in written["machine"]
    assert written["command"].startswith("python -m pipelines.constrained")
    plain, unaware, aware = (written["methods"][name] for name in ("plain", "unaware", "aware"))
    assert plain["num_tokens"] == unaware["num_tokens"] == aware["num_tokens"]
    assert plain["tokens_per_pass"] == 1 < aware["tokens_per_pass"]
    assert aware["accepted_by_source"]["forced"] > 0
    assert "forced" not in unaware["accepted_by_source"]
    assert not {"suffix", "lookup"} & {*unaware["accepted_by_source"], *aware["accepted_by_source"]}
    assert not written["has_memory"]


@pytest.fixture
def measure_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, DecodeStats]]:
    """Measures one request whose texts differ from method to method in one of the two modes."""

    def measure(differs_in: str) -> dict[str, DecodeStats]:
        def decoded(engine: Any, request: GenerationRequest, snapshot: Any) -> tuple[list[int], DecodeStats]:
            assert request.num_draft_tokens == (0 if snapshot is None else None)
            ids = [1, 2] if snapshot is not None and request.mode == differs_in else [1]
            return ids, DecodeStats(decode_s=1.0 if request.mode == "fast" else 9.0)

        monkeypatch.setattr(constrained, "_decoded", decoded)
        engine: Any = None
        snapshots: Any = {"unaware": "one", "aware": "another"}
        return constrained.measure(engine, snapshots, GenerationRequest(prompt="Is it high?"), 1)

    return measure


def test_fast_mode_is_timed_which_does_not_promise_the_same_texts(
    measure_with: Callable[[str], dict[str, DecodeStats]],
) -> None:
    """Reproducible mode makes plain decoding slower than it is without us, on some targets."""
    seconds = {method: stats.decode_s for method, stats in measure_with("fast").items()}
    assert seconds == dict.fromkeys(constrained.METHODS, 1.0)


def test_texts_that_differ_in_reproducible_mode_fail_the_run(
    measure_with: Callable[[str], dict[str, DecodeStats]],
) -> None:
    with pytest.raises(ContractError, match="the texts differ"):
        measure_with("reproducible")


def test_an_interrupted_run_keeps_the_figures_of_what_it_measured(
    asked: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = constrained.measure

    def dies(engine: Any, snapshots: Any, request: Any, number: int) -> Any:
        if number == 1:
            raise MemoryError
        return measure(engine, snapshots, request, number)

    monkeypatch.setattr(constrained, "measure", dies)
    with pytest.raises(MemoryError):
        run_pipeline(constrained.main, *asked)
    written = json.loads((tmp_path / "constrained.json").read_text())
    assert written["prompts"] == 1
    assert written["methods"]["plain"]["num_tokens"] > 0


def test_a_prompt_without_a_schema_is_refused(asked: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Is it high?"}\n')
    with pytest.raises(RequestError, match=r"no schema to answer under: 'Is it high\?'"):
        run_pipeline(constrained.main, *asked)
