"""`omnidraft models` prints the path of what it fetched, and paths as they are."""

import json
from pathlib import Path

import pytest

from omnidraft.models.catalog import known_models, store
from tests.cli_runs import run_cli
from tests.unit.models.native.families import family_config


@pytest.mark.parametrize(("options", "name"), [([], "gemma3-270m"), (["--gguf"], "gemma3-270m.gguf")])
def test_a_pull_prints_the_folder_or_the_gguf_file(
    options: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "gemma3-270m"
    folder.mkdir(parents=True)
    (folder / "omnidraft.json").write_text('{"source": "hub", "fingerprint": "any"}')
    (tmp_path / "models" / "gemma3-270m.gguf").touch()
    done = run_cli(("models", "pull", "gemma3-270m", *options), monkeypatch, capsys, {"OMNIDRAFT_HOME": str(tmp_path)})
    assert done.returncode == 0
    assert done.stdout.strip() == str(tmp_path / "models" / name)


def test_the_list_as_json_has_what_the_table_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "installed", lambda name: None)
    told = json.loads(run_cli(("models", "list", "--json"), monkeypatch, capsys).stdout)
    assert [each["name"] for each in told] == list(known_models.names())
    model = known_models.find(told[0]["name"])
    expected = {"hub_id": model.hub_id, "num_tokens": model.num_tokens, "licence": model.licence, "path": None}
    assert told[0] == {"name": model.name, **expected}


@pytest.mark.parametrize(
    ("model_type", "changes", "path", "reason"),
    [
        ("qwen3", {"head_dim": 16}, "our kernels", None),
        ("gpt2", {"n_embd": 64, "n_head": 4}, "transformers", "gpt2 is no family that our kernels know"),
        ("falcon", {"alibi": True}, "transformers, chains of drafts only", "its layers have a state, chunks or dist"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "transformers, chains of drafts only", "its layers have a state"),
    ],
)
def test_an_inspection_says_which_path_computes_a_model_and_why(
    model_type: str,
    changes: dict[str, object],
    path: str,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    family_config(model_type, changes).save_pretrained(tmp_path)
    told = json.loads(run_cli(("models", "inspect", str(tmp_path), "--json"), monkeypatch, capsys).stdout)
    assert (told["type"], told["computed by"]) == (model_type, path)
    assert told["because"] is None if reason is None else told["because"].startswith(reason)


def test_an_inspection_says_how_weights_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = family_config("llama", {})
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    told = json.loads(run_cli(("models", "inspect", str(tmp_path), "--json"), monkeypatch, capsys).stdout)
    assert (told["quantised as"], told["computed by"]) == ("GPTQ of 4 bits", "our kernels")
