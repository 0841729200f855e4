"""A fleet on Ray Serve, started from deploy/ray/serve.yaml: scaled by its queue, killed, updated, and kept up to date.

The tests share one fleet and stand in the order of an operator's day.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from omnidraft import assembly, config
from omnidraft.assembly.models import vocabularies
from omnidraft.assembly.snapshot_loading import ngram_cache
from omnidraft.decode.generation import GenerationRequest
from omnidraft.demo.local_cluster import free_port
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.ports import Champion, Sampling
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.tiny_models import make_drafter, make_target
from tests.integration.ray_serve_fleet import Asked, Load, ServeFleet, description

NUM_REPLICAS = 3
NUM_SEEDS = 8
NUM_TOKENS = 100
NUM_SWAPS = 6
PROMPTS = "omnidraft_prefix_cache_queries_total"
SWAPPED_S = 2.0
RESUMED_S = 5.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("models")
    make_drafter(root / "drafter")
    one = make_target(root / "one", spread=0.3)
    return str(one), str(make_target(root / "other", seed=7, spread=0.3, vocab_size=360))


@pytest.fixture(scope="module")
def sections(targets: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Settings of the fleet, as its YAML file has them."""
    state = tmp_path_factory.mktemp("state")
    return {
        "models": {
            "target": targets[0],
            "more_targets": [targets[1]],
            "drafter": str(Path(targets[0]).with_name("drafter")),
            "precision": "float32",
            "drafter_precision": "float32",
        },
        "decode": {"mode": "reproducible", "policy": "fixed", "num_draft_tokens": 3, "threads": 1},
        "log": {"url": f"sqlite:///{state}/log.db"},
        "registry": {"url": f"directory:///{state}/registry"},
        "worker": {"poll_s": 0.5},
    }


@pytest.fixture(scope="module")
def fleet(
    targets: tuple[str, str], sections: dict, omnidraft_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeFleet]:
    told = description(free_port(), sections, {targets[0]: NUM_REPLICAS, targets[1]: 1})
    environ = {"OMNIDRAFT_HOME": str(omnidraft_home), "OMP_NUM_THREADS": "1"}
    started = ServeFleet(tmp_path_factory.mktemp("serve"), told, environ)
    try:
        started.wait_for(started.is_ready, "ready fleet")
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def expected(targets: tuple[str, str], sections: dict, omnidraft_home: Path) -> Mapping[int, str]:
    """Seed -> what the library answers in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        engine = assembly.engine(settings_of(sections, targets[0]), CountingMetrics()).engine
        return {seed: text_of(engine, seed) for seed in range(NUM_SEEDS)}


def settings_of(sections: dict, target: str) -> config.Settings:
    return config.load(None, {}, **sections).for_target(target)


def text_of(engine, seed: int) -> str:
    question = GenerationRequest("How many clips", max_new_tokens=NUM_TOKENS, sampling=Sampling(1.0), seed=seed)
    return "".join(step.text for step in engine.stream(question).steps)


def load_of(fleet: ServeFleet, target: str) -> Load:
    return Load(fleet.url, target, NUM_TOKENS, NUM_SEEDS)


def assert_texts(asked: Sequence[Asked], expected: Mapping[int, str]) -> None:
    """Each is what the library answers, or, cut short, a beginning of that."""
    for each in asked:
        assert expected[each.seed].startswith(each.text)
        assert each.told_error or each.text == expected[each.seed]


def test_the_queue_brings_replicas(fleet: ServeFleet, targets: tuple[str, str], expected: Mapping[int, str]) -> None:
    assert len(fleet.replicas(targets[0])) == 1
    load = load_of(fleet, targets[0])
    with load.running(num_clients=9):
        seconds = fleet.wait_for(lambda: len(fleet.replicas(targets[0])) == NUM_REPLICAS, "more replicas")
    print(f"from 1 to {NUM_REPLICAS} replicas in {seconds:.1f} s under {len(load.asked)} requests")
    assert load.bad() == []
    assert_texts(load.asked, expected)
    assert len(fleet.replicas(targets[1])) == 1


def test_the_ingress_chooses_the_target_and_speaks_for_all(fleet: ServeFleet, targets: tuple[str, str]) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    assert sorted(each.id for each in client.models.list()) == sorted(targets)
    for target in targets:
        answer = client.completions.create(model=target, prompt="How", max_tokens=4, seed=1)
        assert answer.model == target
        assert answer.system_fingerprint.startswith(f"base/{target}")
    with pytest.raises(openai.NotFoundError, match="no model 'third' here"):
        client.completions.create(model="third", prompt="How", max_tokens=4)
    refused = httpx.post(f"{fleet.url}/v1/completions", content=b" " * 1_000_001)
    assert (refused.status_code, refused.json()["error"]["type"]) == (413, "invalid_request_error")
    scrape = httpx.get(f"{fleet.url}/metrics").text
    workers = {*fleet.replicas(targets[0]), *fleet.replicas(targets[1])}
    assert all(f'worker="{worker}"' in scrape for worker in workers)


def test_a_conversation_goes_to_the_replica_that_holds_its_keys(fleet: ServeFleet, targets: tuple[str, str]) -> None:
    """Each is asked three times; its replica is killed before the last time."""
    asked = "How many clips did they sell? " * 6  # long enough that the keys of its beginning are reused
    questions = [f"{number}. There were {number} friends. {asked}" for number in range(9)]
    histories = [[{"role": "user", "content": question}] for question in questions]
    replicas = [ask_next(fleet, targets[0], history)[0] for history in histories]
    assert len(set(replicas)) > 1
    again = [ask_next(fleet, targets[0], history) for history in histories]
    found = sum(now == first and num_cached > 0 for first, (now, num_cached) in zip(replicas, again, strict=True))
    print(f"{found} of {len(histories)} second turns found their keys")
    assert found >= len(histories) - 1
    before = set(fleet.replicas(targets[0]))
    os.kill(int(replicas[0].rpartition("-")[2]), signal.SIGKILL)
    elsewhere = [ask_next(fleet, targets[0], history)[0] for history in histories]
    assert replicas[0] not in elsewhere
    fleet.wait_for(lambda: len(set(fleet.replicas(targets[0])) - before) == 1, "new replica")


def ask_next(fleet: ServeFleet, target: str, history: list[dict[str, str]]) -> tuple[str, int]:
    """The replica that took the next turn, and how many tokens of the prompt it did not read."""
    before = num_prompts(fleet)
    body = {"model": target, "messages": history, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60).json()
    text = answer["choices"][0]["message"]["content"]
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    (replica,) = [worker for worker, number in num_prompts(fleet).items() if number > before.get(worker, 0)]
    return replica, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_prompts(fleet: ServeFleet) -> dict[str, float]:
    """Prompt tokens that each replica was asked for."""
    numbers: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{fleet.url}/metrics", timeout=10).text):
        for sample in family.samples:
            if sample.name == PROMPTS:
                worker = sample.labels["worker"]
                numbers[worker] = numbers.get(worker, 0) + sample.value
    return numbers


def test_a_replica_killed_under_load_loses_nothing_that_had_not_begun(
    fleet: ServeFleet, targets: tuple[str, str], expected: Mapping[int, str]
) -> None:
    load = load_of(fleet, targets[0])
    before = set(fleet.replicas(targets[0]))
    victim = sorted(before)[0]
    with load.running(num_clients=9):
        time.sleep(2)
        killed_s = time.monotonic()
        os.kill(int(victim.rpartition("-")[2]), signal.SIGKILL)
        fleet.wait_for(lambda: len(set(fleet.replicas(targets[0])) - {victim}) == NUM_REPLICAS, "new replica")
        replaced_s = time.monotonic() - killed_s
        time.sleep(1)
    new = set(fleet.replicas(targets[0])) - before
    gap_s = load.longest_gap_s(killed_s)
    retried = fleet.log.count("a replica died under /v1/completions")
    print(f"{len(load.asked)} requests, {retried} asked again, {len(load.bad())} streams ended with an error,")
    print(f"longest time without a finished text {gap_s:.2f} s, three replicas again after {replaced_s:.1f} s")
    assert len(new) == 1
    assert retried + len(load.bad()) > 0  # the kill met requests
    assert all(each.is_stream and each.text and "ask again" in (each.told_error or "") for each in load.bad())
    assert_texts(load.asked, expected)
    assert gap_s < RESUMED_S


def test_a_snapshot_reaches_all_replicas_within_two_seconds(
    fleet: ServeFleet, targets: tuple[str, str], sections: dict, tmp_path: Path
) -> None:
    settings = settings_of(sections, targets[0])
    registry = assembly.registry(settings)
    versions = [publish(settings, tmp_path / f"lora-{number}", parent) for number, parent in enumerate((None, 1))]
    seconds = [announce(fleet, settings, registry, versions[turn % 2]) for turn in range(NUM_SWAPS)]
    print(f"announcement to all {NUM_REPLICAS} replicas: {', '.join(f'{each:.2f}' for each in seconds)} s")
    assert max(seconds) < SWAPPED_S
    answer = httpx.post(f"{fleet.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()
    assert answer["system_fingerprint"].startswith(f"lora-{(NUM_SWAPS - 1) % 2}/")


def publish(settings: config.Settings, folder: Path, parent: int | None) -> int:
    """A version with random factors."""
    words = vocabularies(settings)
    tensors = load_trainable(Path(settings.models.drafter), train="lora", rank=4, seed=0).serving_tensors()
    tensors = {name: torch.randn(tensor.shape) * 0.1 for name, tensor in tensors.items()}
    models = settings.models
    manifest = Manifest(
        snapshot_id=folder.name,
        target=models.target,
        drafter=models.drafter,
        drafter_hash="h",
        alignment=words.alignment.fingerprint,
        train="lora",
    )
    cache = ngram_cache(settings, words, None).to_arrays()
    bundle.write(folder, manifest, {bundle.DRAFTER: tensors, bundle.NGRAMS: cache})
    return assembly.registry(settings).publish(folder, parent).version


def announce(fleet: ServeFleet, settings: config.Settings, registry, version: int) -> float:
    """Seconds from the announcement until every replica serves it; the first time it has to be loaded."""
    models = settings.models
    registry.promote(version)
    assembly.control_log(settings, CountingMetrics()).put(("champion",), Champion(version=version))

    def is_everywhere() -> bool:
        served = [each["snapshot_version"] for each in fleet.replicas(models.target).values()]
        return served == [version] * NUM_REPLICAS

    return fleet.wait_for(is_everywhere, f"version {version} everywhere", look_s=0.02)


def test_a_changed_setting_is_rolled_out_under_load(
    fleet: ServeFleet, targets: tuple[str, str], expected: Mapping[int, str]
) -> None:
    """`serve deploy` of a file with another limit: replicas are replaced one by one, and no request fails."""
    (application,) = fleet.told["applications"]
    application["args"]["settings"]["worker"]["max_new_tokens"] = NUM_TOKENS
    before = set(fleet.replicas(targets[0]))
    load = load_of(fleet, targets[0])
    with load.running(num_clients=4):
        fleet.deploy()
        seconds = fleet.wait_for(lambda: is_replaced(before, set(fleet.replicas(targets[0]))), "new replicas")
    print(f"{len(before)} replicas replaced in {seconds:.1f} s under {len(load.asked)} requests")
    assert load.bad() == []
    assert_texts(load.asked, expected)
    body = {"model": targets[0], "prompt": "x", "max_tokens": NUM_TOKENS + 1, "ignore_eos": True}
    answered = httpx.post(f"{fleet.url}/v1/completions", json=body)
    assert answered.json()["usage"]["completion_tokens"] == NUM_TOKENS


def is_replaced(before: set[str], now: set[str]) -> bool:
    return len(now) >= len(before) and not before & now
