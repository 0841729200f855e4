"""Exported drafters in vLLM's own drafting: it loads them, and its greedy texts stay those of the target."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnidraft import config
from omnidraft.assembly.export import ExportFormat, export_snapshot
from omnidraft.testing import tiny_models
from pipelines.lib.vllm_server import VllmServer, serve
from tests.vllm.conftest import HIDDEN_SIZE, VENV

pytestmark = pytest.mark.vllm

QUESTIONS = [f"How many clips did {name} sell in May?" for name in ("Natalia", "Tom")]
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2", "--seed", "0", "--enforce-eager")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def wide_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads are as large as vLLM's attention wants them."""
    return tiny_models.make_drafter(tmp_path_factory.mktemp("models") / "drafter", hidden_size=HIDDEN_SIZE)


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("plain") / "vllm.log"
    with serve(VENV, target, log, arguments=ARGUMENTS, threads=1) as server:
        yield server


@pytest.mark.parametrize(
    ("form", "options"), [("hf", {"use_heterogeneous_vocab": True}), ("hf-target-vocab", {})], ids=["hf", "target"]
)
def test_vllm_drafts_with_an_exported_drafter_and_writes_the_targets_texts(
    plain: VllmServer,
    target: Path,
    wide_drafter: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: ExportFormat,
    options: dict[str, Any],
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(home))
    settings = config.load(None, {}, models={"target": str(target), "drafter": str(wide_drafter)})
    export_snapshot(settings, "base", form, tmp_path / "out")
    speculation = {"method": "draft_model", "model": str(tmp_path / "out"), "num_speculative_tokens": 3, **options}
    log = tmp_path / "vllm.log"
    with serve(VENV, target, log, speculation=speculation, arguments=ARGUMENTS, threads=1) as server:
        assert server.complete(QUESTIONS, NUM_TOKENS) == plain.complete(QUESTIONS, NUM_TOKENS)
        assert server.counters()["vllm:spec_decode_num_draft_tokens_total"] > 0
