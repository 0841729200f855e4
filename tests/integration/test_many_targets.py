"""One worker, two targets, one drafter: each pair decodes, records, learns and swaps as if it were alone."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import openai
import pytest
import torch

from omnidraft import assembly, config
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.ports import DraftTree, Noise, Proposer, ProposerSession, Request, Sampling
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.queued_request import QueuedRequest, QueueFull
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.tiny_models import make_drafter, make_target
from tests.http_server import served
from tests.tiny_engine import PATIENCE_S, Gated, snapshot, steps_of, tiny_settings

NUM_TOKENS = 12
RANK = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two targets with different tokenizers and texts, and the drafter."""
    root = tmp_path_factory.mktemp("many")
    one = make_target(root / "one", spread=0.3)
    other = make_target(root / "other", seed=7, spread=0.3, vocab_size=360)
    return one, other, make_drafter(root / "drafter")


@pytest.fixture
def settings(
    folders: tuple[Path, Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> config.Settings:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    one, other, drafter = folders
    return tiny_settings(
        (one, drafter),
        more_targets=[other],
        log={"url": f"sqlite:///{tmp_path}/log.db"},
        registry={"url": f"directory:///{tmp_path}/registry"},
        learner={"records_per_step": 2, "steps_per_snapshot": 1, "held_out_every": 0, "learning_rate": 3e-3},
        worker={"poll_s": 0.01},
    )


@dataclass
class Running:
    """A worker behind its HTTP application, and a client of it."""

    worker: assembly.Worker
    requests: RequestQueue
    client: openai.OpenAI
    metrics: CountingMetrics

    @property
    def names(self) -> list[str]:
        return [each.engine.pair.target for each in self.worker.served]

    def submit(self, engine: Engine, question: GenerationRequest) -> QueuedRequest:
        return self.requests.submit(QueuedRequest(engine, [question]))

    def ask(self, name: str, seed: int = 3, temperature: float = 1.0) -> openai.types.Completion:
        return self.client.completions.create(
            model=name, prompt="How many clips", max_tokens=NUM_TOKENS, seed=seed, temperature=temperature
        )


@pytest.fixture
def running(settings: config.Settings) -> Iterator[Running]:
    metrics = CountingMetrics()
    worker = assembly.worker(settings, metrics)
    requests = RequestQueue(metrics, max_waiting=2)
    models = [ServedModel(each.engine, each.target.fingerprint) for each in worker.served]
    with served(application(requests, models, settings.worker, lambda: b"")) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield Running(worker, requests, client, metrics)
        requests.close(PATIENCE_S)
    assert worker.producer is not None
    worker.producer.close(PATIENCE_S)


def test_each_target_answers_as_if_it_were_alone_while_both_are_asked_at_once(
    running: Running, settings: config.Settings
) -> None:
    assert [model.id for model in running.client.models.list()] == list(settings.models.targets) == running.names
    asked = [(name, temperature) for temperature in (0.0, 1.0) for name in running.names]
    answers: dict[tuple[str, float], openai.types.Completion] = {}

    def ask(name: str, temperature: float) -> None:
        answers[name, temperature] = running.ask(name, temperature=temperature)

    threads = [threading.Thread(target=ask, args=each) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for name in running.names:
        alone = assembly.engine(settings.for_target(name), CountingMetrics())
        for temperature in (0.0, 1.0):
            answer = answers[name, temperature]
            assert answer.choices[0].text == text_of(alone.engine, temperature) != ""
            assert answer.model == name
            assert answer.system_fingerprint == f"base/{alone.target.fingerprint}"
        assert running.metrics.value("omnidraft_requests_total", status="ok", target=name) == 2
        assert running.metrics.value("omnidraft_emitted_tokens_total", target=name) > 0
    assert len({answer.choices[0].text for answer in answers.values()}) == 4


def text_of(engine: Engine, temperature: float) -> str:
    question = GenerationRequest(
        prompt="How many clips", max_new_tokens=NUM_TOKENS, sampling=Sampling(temperature), seed=3
    )
    return "".join(step.text for step in engine.stream(question).steps)


def test_both_targets_share_the_base_drafter_and_keep_alignment_and_cache_apart(running: Running) -> None:
    one, other = (each.engine.slot.current for each in running.worker.served)
    mine, its = (each.proposer.sources[-1] for each in (one, other))
    assert mine.model is its.model
    assert one.cache is not other.cache
    assert mine.alignment.fingerprint != its.alignment.fingerprint


def test_each_target_takes_up_its_own_lora_and_its_swap_leaves_the_other_alone(
    running: Running, settings: config.Settings, folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """The factors have another rank than the settings say; a controller for both serves one control log."""
    served, stop = running.worker.served, threading.Event()
    before = [running.ask(name).choices[0].text for name in running.names]
    drafts = [drafted(each.engine) for each in served]
    assert settings.learner.lora_rank != RANK
    for number, each in enumerate(served):
        held = [other.engine.slot.current for other in served]
        publish_lora(each, settings, folders[2], tmp_path / f"lora-{number}", seed=number)
        pair = settings.for_target(each.engine.pair.target)
        assembly.controller(pair, CountingMetrics()).step()
        for other in served:
            assert other.updater is not None
            other.updater.step(stop)
        assert each.engine.slot.current.snapshot_id == f"lora-{number}"
        assert served[1 - number].engine.slot.current.proposer is held[1 - number].proposer
        drafts.append(drafted(each.engine))
    assert drafts[0] != drafts[2]
    assert drafts[1] != drafts[3]
    models = [each.engine.slot.current.proposer.sources[-1].model for each in served]
    assert models[0] is not models[1]
    assert [running.ask(name).choices[0].text for name in running.names] == before
    ids = [running.ask(name).system_fingerprint.split("/")[0] for name in running.names]
    assert ids == ["lora-0", "lora-1"]


def publish_lora(
    served: assembly.ServedTarget, settings: config.Settings, drafter: Path, folder: Path, *, seed: int
) -> None:
    """A version of this pair with large random factors."""
    tensors = load_trainable(drafter, train="lora", rank=RANK, seed=0).serving_tensors()
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in tensors.items()}
    pair = served.engine.pair
    manifest = Manifest(
        snapshot_id=folder.name,
        target=pair.target,
        drafter=pair.drafter,
        drafter_hash="h",
        alignment=pair.alignment,
        train="lora",
        agreement_before=0.4,
        agreement_after=0.5,
        agreement_change_error=0.01,
        held_out_records=50,
    )
    ngrams = served.engine.slot.current.cache.to_arrays()
    bundle.write(folder, manifest, {bundle.DRAFTER: tensors, bundle.NGRAMS: ngrams})
    assembly.registry(settings.for_target(pair.target)).publish(folder, None)


def drafted(engine: Engine) -> list[tuple[int, ...]]:
    question = GenerationRequest(prompt="How many clips", max_new_tokens=NUM_TOKENS, seed=3, is_stored=False)
    return [step.tree.tokens for step in engine.stream(question).steps]


@dataclass
class Noting(Proposer):
    """Drafts nothing, and notes every pass."""

    name: str
    passes: list[str]
    has_begun: threading.Event = field(default_factory=threading.Event)

    def open(self, request: Request) -> "_Notes":
        return _Notes(self, request.prompt_ids[-1])


@dataclass
class _Notes(ProposerSession):
    noting: Noting
    root: int

    def propose(self, position: int, budget: int, noise: Noise) -> DraftTree:
        self.noting.passes.append(self.noting.name)
        self.noting.has_begun.set()
        return DraftTree.empty(self.root)

    def observe(self, emitted: Sequence[int]) -> None:
        self.root = emitted[-1]


def test_a_long_text_of_one_target_takes_turns_with_the_texts_of_the_other(running: Running) -> None:
    one, other = (each.engine for each in running.worker.served)
    passes: list[str] = []
    long, short = Noting("long", passes), Noting("short", passes)
    one.slot.swap(snapshot(1, long))
    other.slot.swap(snapshot(1, short))
    first = running.submit(one, GenerationRequest(prompt="a", max_new_tokens=400, seed=1, is_stored=False))
    assert long.has_begun.wait(PATIENCE_S)
    second = running.submit(other, GenerationRequest(prompt="b", max_new_tokens=5, seed=1, is_stored=False))
    assert sum(len(step.emitted) for _, step in steps_of(second)) == 5
    first.is_abandoned = True
    begun, ended = passes.index("short"), len(passes) - passes[::-1].index("short")
    assert all(before != after for before, after in pairwise(passes[begun:ended]))
    assert "long" in passes[:begun]


def test_a_full_line_refuses_its_own_targets_requests_only(running: Running) -> None:
    one, other = (each.engine for each in running.worker.served)
    gated, question = Gated(), GenerationRequest(prompt="a", max_new_tokens=2, seed=1, is_stored=False)
    one.slot.swap(snapshot(1, gated))
    tickets = [running.submit(one, question)]
    assert gated.is_reached.wait(PATIENCE_S)
    tickets += [running.submit(one, question) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests are waiting already"):
        running.submit(one, question)
    tickets.append(running.submit(other, question))
    gated.gate.set()
    assert [sum(len(step.emitted) for _, step in steps_of(ticket)) for ticket in tickets] == [2] * 4


def test_records_of_both_targets_in_one_log_teach_each_pair_its_own_only(
    running: Running, settings: config.Settings, tmp_path: Path
) -> None:
    """Counts cover every offset; nothing of the other pair is a dead letter; each worker slot follows its pair."""
    nums = {running.names[0]: 4, running.names[1]: 2}
    for name, num in nums.items():
        for seed in range(num):
            running.ask(name, seed=seed)
    assert running.worker.producer is not None
    assert running.worker.producer.close(PATIENCE_S) == 0
    versions = {}
    for number, (name, num) in enumerate(nums.items()):
        pair = settings.for_target(name)
        metrics = CountingMetrics()
        distillation = assembly.distillation(pair, metrics, folder=tmp_path / f"staging-{number}")
        distillation.run(stop_when(lambda it=distillation, num=num: it.status().num_records == num))
        manifest = assembly.registry(pair).resolve("latest").manifest
        assert (manifest.target, manifest.num_records) == (name, num)
        section = settings.learner
        learned_with = {"loss": section.loss, "learning_rate": section.learning_rate, "lora_rank": section.lora_rank}
        assert {name: manifest.settings[name] for name in learned_with} == {k: str(v) for k, v in learned_with.items()}
        assert assembly.registry(pair).versions()[0].manifest.settings == {}
        assert manifest.num_records + manifest.counts.get("other_pair", 0) == sum(manifest.offsets.values())
        assembly.registry(pair).promote(assembly.registry(pair).resolve("latest").version)  # nothing was held out
        assembly.controller(pair, CountingMetrics()).step()
        versions[name] = assembly.registry(pair).resolve("champion").version
    assert assembly.log_reader(settings, settings.log.dead_letters_topic).end_offsets() in ({}, {0: 0})
    assert versions[running.names[0]] != versions[running.names[1]]
    for each in running.worker.served:
        assert each.updater is not None
        each.updater.step(threading.Event())
    assert {each.engine.pair.target: each.engine.slot.current.version for each in running.worker.served} == versions


def stop_when(is_done):
    """Asked before every step; gives up after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    return lambda: is_done() or time.monotonic() > deadline
