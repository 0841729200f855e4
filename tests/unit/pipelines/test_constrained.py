"""The bench of structured output measures all three methods on the same texts."""

import json
from pathlib import Path

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
mode = "reproducible"
policy = "fixed"
num_draft_tokens = 5
threads = 1
"""


def test_the_report_has_the_same_texts_of_a_drafter_that_is_aware_and_one_that_is_not(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path
) -> None:
    prompts, settings, out = tmp_path / "prompts.jsonl", tmp_path / "tiny.toml", tmp_path / "constrained.json"
    prompts.write_text(json.dumps({"id": "1", "prompt": "Is the tide high?", "schema": SCHEMA}) + "\n")
    settings.write_text(SETTINGS)
    target, drafter = map(str, tiny_models)
    models = ("--target", target, "--drafter", drafter, "--config", settings)
    run_pipeline(constrained.main, *models, "--prompts", prompts, "--max-new-tokens", "24", "--json", out)
    written = json.loads(out.read_text())
    plain, unaware, aware = (written["methods"][name] for name in ("plain", "unaware", "aware"))
    assert plain["num_tokens"] == unaware["num_tokens"] == aware["num_tokens"]
    assert plain["tokens_per_pass"] == 1 < aware["tokens_per_pass"]
    assert aware["accepted_by_source"]["forced"] > 0
    assert "forced" not in unaware["accepted_by_source"]
    assert not {"suffix", "lookup"} & {*unaware["accepted_by_source"], *aware["accepted_by_source"]}
    assert not written["has_memory"]
