"""The command line with llama.cpp under the target: a GGUF file beside its model folder, drafts in other tokens."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.errors import OmnidraftError
from omnidraft.testing.tiny_models import make_drafter, make_target
from tests.cli_runs import run_cli
from tests.tiny_gguf import write_gguf_beside
from tests.unit.models.tiny_llamacpp import require_llamacpp


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target, with its GGUF file beside it, and of a drafter."""
    root = tmp_path_factory.mktemp("models")
    target = make_target(root / "target", spread=0.3)
    write_gguf_beside(target)
    return target, make_drafter(root / "drafter")


def arguments(pair: tuple[Path, Path], *more: object) -> list[object]:
    models = ["--target", pair[0], "--drafter", pair[1], "--engine", "llamacpp"]
    return ["generate", "--prompt", "How many clips?", *models, "--max-new-tokens", 24, "--temperature", 1, *more]


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_drafts_do_not_show_in_the_text_of_a_gguf_file(pair, mode, omnidraft_home, monkeypatch, capsys):
    require_llamacpp()
    environ = {"OMNIDRAFT_HOME": str(omnidraft_home), "OMP_NUM_THREADS": "1"}
    drafted, plain = (
        run_cli(arguments(pair, "--mode", mode, *more), monkeypatch, capsys, environ)
        for more in ([], ["--num-draft-tokens", 0])
    )
    assert (drafted.returncode, plain.returncode) == (0, 0), drafted.stderr
    assert drafted.stdout == plain.stdout
    assert "24 tokens" in plain.stderr


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
def test_without_llamacpp_the_extra_is_named(pair, omnidraft_home, monkeypatch, capsys):
    refused = run_cli(arguments(pair), monkeypatch, capsys, {"OMNIDRAFT_HOME": str(omnidraft_home)})
    assert refused.returncode == 2
    assert "pip install 'omnidraft[llamacpp]'" in refused.stderr


def test_a_target_that_is_no_gguf_file_is_refused(pair, omnidraft_home, monkeypatch):
    require_llamacpp()
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    whole = config.load(None, {}, models={"target": str(pair[0]), "drafter": str(pair[1]), "engine": "llamacpp"})
    words = assembly.vocabularies(whole)
    models = whole.models.model_copy(update={"target": "nobody/nothing"})
    with pytest.raises(OmnidraftError, match="GGUF file"):
        assembly.target(whole.model_copy(update={"models": models}), words)
