"""A snapshot by name: a folder, a version or an alias, verified and of this pair."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr

from omnidraft import assembly, config, system
from omnidraft.assembly.snapshot_loading import snapshot_loader
from omnidraft.config import Settings
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.decode.prefill_chunk import MAX_PREFILL_S
from omnidraft.errors import ModelError, RegistryError, SnapshotCorrupt, VocabularyError
from omnidraft.snapshots import bundle
from omnidraft.snapshots.keys import PrivateKey, TrustedKeys, new_private_key
from omnidraft.snapshots.signing import SnapshotSigning
from omnidraft.telemetry.metrics import CountingMetrics
from tests.homes import make_home
from tests.snapshot_folders import manifest
from tests.tiny_engine import tiny_settings
from tests.tiny_gguf import write_tokenizer_gguf
from tests.warm_cache import warmed


@pytest.fixture
def settings(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    return tiny_settings(tiny_models, registry={"url": f"directory:///{tmp_path}/registry"})


@pytest.fixture
def folder(settings: Settings, tmp_path: Path) -> Path:
    """The base drafter with a warm n-gram cache, not published."""
    words = assembly.vocabularies(settings)
    cache = warmed(assembly.ngram_cache(settings, words, None), words.alignment)
    assert len(cache) > 0
    told = manifest("warm", target=settings.models.target, drafter=settings.models.drafter)
    bundle.write(tmp_path / "warm", told, {bundle.NGRAMS: cache.to_arrays()})
    return tmp_path / "warm"


def test_a_folder_is_served_without_a_version(settings: Settings, folder: Path) -> None:
    held = assembly.engine(settings, CountingMetrics(), snapshot=str(folder)).engine.slot.current
    assert (held.version, held.snapshot_id) == (None, "warm")
    assert held.manifest is not None
    assert len(held.cache) > 0  # type: ignore[arg-type]


def test_a_snapshot_without_ngrams_is_served_with_a_fresh_cache(settings: Settings, tmp_path: Path) -> None:
    told = manifest("bare", target=settings.models.target, drafter=settings.models.drafter)
    bundle.write(tmp_path / "bare", told, {})
    held = assembly.engine(settings, CountingMetrics(), snapshot=str(tmp_path / "bare")).engine.slot.current
    assert held.snapshot_id == "bare"
    assert len(held.cache) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_snapshot_of_another_base_drafter_serves_and_the_log_says_so(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_ours: bool
) -> None:
    own = assembly.identity(settings, assembly.vocabularies(settings))
    told = manifest("made", target=own.target, drafter=own.drafter, drafter_hash=own.drafter_hash if is_ours else "x")
    bundle.write(tmp_path / "made", told, {})
    with caplog.at_level(logging.WARNING):
        held = assembly.engine(settings, CountingMetrics(), snapshot=str(tmp_path / "made")).engine.slot.current
    assert held.snapshot_id == "made"
    assert ("another base drafter" in caplog.text) is not is_ours


@pytest.mark.parametrize("name", ["1", "challenger", "latest"])
def test_a_version_or_alias_comes_from_the_registry(settings: Settings, folder: Path, name: str) -> None:
    assembly.registry(settings).publish(folder, None)
    held = assembly.engine(settings, CountingMetrics(), snapshot=name).engine.slot.current
    assert (held.version, held.snapshot_id) == (1, "warm")


@pytest.fixture
def with_head(settings: Settings, tmp_path: Path) -> Path:
    """The base drafter's own weights and a head that has learned nothing."""
    words = assembly.vocabularies(settings)
    decode = settings.decode.model_copy(update={"policy": "acceptance"})
    learner = assembly.learner(settings.model_copy(update={"decode": decode}), words)
    told = manifest("head", target=settings.models.target, drafter=settings.models.drafter, train="full")
    parts = {bundle.DRAFTER: learner.serving_tensors(), bundle.NGRAMS: learner.cache.to_arrays()}
    bundle.write(tmp_path / "head", told, parts)
    return tmp_path / "head"


def text_of(worker: assembly.Worker, num_draft_tokens: int = 5) -> str:
    question = GenerationRequest("Natalia sold clips", max_new_tokens=24, seed=1, num_draft_tokens=num_draft_tokens)
    return "".join(step.text for step in worker.engine.stream(question).steps)


def test_a_snapshots_head_judges_for_the_acceptance_policy_and_the_text_is_the_targets(
    settings: Settings, with_head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decode = settings.decode.model_copy(update={"policy": "acceptance"})
    asking = settings.model_copy(update={"decode": decode})
    with caplog.at_level(logging.INFO):
        judged = assembly.engine(asking, CountingMetrics(), snapshot=str(with_head))
        assert "acceptance head" not in caplog.text
        measured = assembly.engine(asking, CountingMetrics())
    assert caplog.text.count("no acceptance head: its chains end by measured agreement") == 1
    plain = text_of(judged, num_draft_tokens=0)
    assert plain
    assert text_of(judged) == text_of(measured) == plain
    heads = [worker.engine.slot.current.proposer.sources[-1].model.has_head for worker in (judged, measured)]
    assert heads == [True, False]


def test_without_a_name_it_is_the_base_drafter(settings: Settings) -> None:
    held = assembly.engine(settings, CountingMetrics()).engine.slot.current
    assert (held.version, held.manifest) == (None, None)


def test_a_snapshot_that_cannot_be_used_is_refused(settings: Settings, folder: Path, tmp_path: Path) -> None:
    def load(name: str) -> None:
        assembly.engine(settings, CountingMetrics(), snapshot=name)

    with pytest.raises(RegistryError, match="there is no registry"):
        load("champion")
    with pytest.raises(SnapshotCorrupt):
        load(str(tmp_path))
    foreign = assembly.ngram_cache(settings, assembly.vocabularies(settings), None).to_arrays()
    foreign["alignment"] = foreign["alignment"][::-1].copy()
    bundle.write(tmp_path / "foreign", manifest("foreign"), {bundle.NGRAMS: foreign})
    with pytest.raises(VocabularyError):
        load(str(tmp_path / "foreign"))


def test_where_signatures_are_asked_for_a_folder_needs_one_too(
    settings: Settings, folder: Path, tmp_path: Path
) -> None:
    text = new_private_key()
    key = PrivateKey(text)
    trusted = (key.public_text("distiller"),)
    keys = {"url": settings.registry.url, "private_key": SecretStr(text), "trusted_keys": trusted}
    signing = settings.model_copy(update={"registry": config.RegistrySettings(**keys)})
    with pytest.raises(SnapshotCorrupt, match="has no signature"):
        assembly.engine(signing, CountingMetrics(), snapshot=str(folder))
    told = bundle.read_manifest(folder)
    own = SnapshotSigning(key, TrustedKeys(trusted))
    bundle.write(tmp_path / "signed", told, {bundle.NGRAMS: folder / bundle.NGRAMS}, signing=own)
    assert assembly.engine(signing, CountingMetrics(), snapshot=str(tmp_path / "signed")).engine.slot.current
    assembly.registry(signing).publish(folder, None)
    assert assembly.engine(signing, CountingMetrics(), snapshot="latest").engine.slot.current.version == 1


def test_a_swap_keeps_the_policys_statistics_and_the_limit_of_the_drafters_memory(settings: Settings) -> None:
    decode = settings.decode.model_copy(update={"policy": "cost"})
    words = assembly.vocabularies(settings)
    costs = MeasuredCosts(assembly.target(settings, words))
    shared = assembly.shared_drafting(decode, costs)
    load = snapshot_loader(settings.model_copy(update={"decode": decode}), words, shared)
    first, second = (load(None, None).proposer for _ in range(2))
    assert isinstance(first, TreeProposer)
    assert isinstance(second, TreeProposer)
    assert first.policy_for("fast") is second.policy_for("fast")
    assert first.policy_for("fast") is not first.policy_for("reproducible")
    assert first.calibrators is not second.calibrators
    drafters = [each.sources[-1] for each in (first, second)]
    assert all(isinstance(each, Drafter) for each in drafters)
    assert drafters[0].pool.memory is drafters[1].pool.memory  # type: ignore[attr-defined]
    assert drafters[0].pool is not drafters[1].pool  # type: ignore[attr-defined]
    assert drafters[0].max_read_s == MAX_PREFILL_S  # type: ignore[attr-defined]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A process that would compute on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_target_that_is_packed_already_computes_on_as_many_threads_as_the_settings_say(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first start loads it through transformers, the second maps a file."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(home := make_home(tmp_path)))
    packing = settings.model_copy(update={"models": settings.models.model_copy(update={"precision": "int8"})})
    for _ in range(2):
        torch.set_num_threads(2)
        assembly.target(packing, assembly.vocabularies(packing))
        assert torch.get_num_threads() == packing.decode.threads == 1
    assert list((home / "packed").glob("*.safetensors"))


@pytest.mark.usefixtures("two_threads")
def test_a_target_computes_on_no_more_threads_than_its_containers_quota(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    unlimited = settings.model_copy(update={"decode": settings.decode.model_copy(update={"threads": None})})
    assembly.target(unlimited, assembly.vocabularies(unlimited))
    assert torch.get_num_threads() == 1


def test_llamacpp_serves_a_file_of_an_architecture_that_is_not_converted(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its tokenizer is converted: llama.cpp reads the weights."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    file = tmp_path / "mamba.gguf"
    tokens = write_tokenizer_gguf(file)
    named = settings.models.model_copy(update={"target": str(file)})
    with pytest.raises(ModelError, match=r"set models\.engine = 'llamacpp'"):
        assembly.served_vocabularies(settings.model_copy(update={"models": named}))
    run = named.model_copy(update={"engine": "llamacpp"})
    with_llamacpp = settings.model_copy(update={"models": run})
    for load in (assembly.served_vocabularies, assembly.vocabularies):
        assert len(load(with_llamacpp).target.vocabulary) == len(tokens)
