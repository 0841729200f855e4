"""Our proposer inside vLLM's real engine, over a tiny model on this machine's processor."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omnidraft import assembly, config
from omnidraft.decode.external.round_scheduler import IDLE_S
from omnidraft.decode.external.sequence_tracker import KEEP_S
from omnidraft.snapshots import bundle
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from pipelines.lib.vllm_server import VllmServer, custom_class, serve
from tests.vllm.conftest import VENV

pytestmark = pytest.mark.vllm

NUM_TOKENS = 5
QUESTIONS = [
    f"How many clips did {name} sell in {month}?" for name in ("Natalia", "Tom", "you") for month in "ab\u20ac4"
]
PATIENCE_S = 60.0
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--seed", "0", "--enforce-eager")
SCARCE = ("--num-gpu-blocks-override", "18", "--block-size", "32")
"""Memory for one text of --max-model-len and no more."""
LONG = 300
"""Tokens; ten blocks, so no two such texts fit."""


def settings_of(folder: Path, target: Path, drafter: Path) -> config.Settings:
    names = {"target": str(target), "drafter": str(drafter), "drafter_precision": "float32"}
    return config.load(
        None,
        {},
        models=names,
        log={"url": f"sqlite:///{folder / 'log.db'}"},
        registry={"url": f"directory:///{folder / 'registry'}"},
        worker={"poll_s": 0.2},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def settings(folder: Path, target: Path, drafter: Path, home: Path) -> Iterator[config.Settings]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(home))
        yield settings_of(folder, target, drafter)


@pytest.fixture(scope="module")
def plain(folder: Path, target: Path) -> Iterator[VllmServer]:
    with serve(VENV, target, folder / "plain.log", arguments=ARGUMENTS, threads=1) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(folder: Path, settings: config.Settings, home: Path) -> Iterator[VllmServer]:
    """Settings from a file and the environment; metrics among vLLM's own; memory so short that texts are preempted."""
    told = settings.model_dump(mode="json")
    path = folder / "omnidraft.toml"
    path.write_text(f"""
[models]
target = "{told["models"]["target"]}"
drafter = "{told["models"]["drafter"]}"
drafter_precision = "float32"
[worker]
poll_s = 0.2
[decode]
policy = "fixed"
""")
    prometheus = folder / "prometheus"
    prometheus.mkdir()
    environment = {
        "OMNIDRAFT_HOME": str(home),
        "OMNIDRAFT_CONFIG": str(path),
        "OMNIDRAFT_LOG": settings.log.url,
        "MLFLOW_TRACKING_URI": settings.registry.url,
        "PROMETHEUS_MULTIPROC_DIR": str(prometheus),
    }
    with serve(
        VENV,
        Path(settings.models.target),
        folder / "drafting.log",
        speculation=custom_class(NUM_TOKENS),
        settings=environment,
        arguments=(*ARGUMENTS, *SCARCE),
        threads=1,
    ) as server:
        yield server


def records(settings: config.Settings) -> list[TraceRecord]:
    reader = assembly.log_reader(settings, settings.log.traces_topic)
    try:
        return [codec.decode(message.value, message.headers) for message in reader.poll(100_000, 1.0).messages]
    finally:
        reader.close()


def metric(server: VllmServer, name: str, **labels: str) -> float:
    said = httpx.get(f"{server.url}/metrics", timeout=30).text
    found = [
        sample.value
        for family in text_string_to_metric_families(said)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found)


def wait_for(is_so, what: str, patience_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what} did not come"
        time.sleep(0.2)


def test_texts_are_those_of_plain_vllm(plain: VllmServer, drafting: VllmServer):
    """One after the other, and all at once in memory for one."""
    wanted = [plain.complete([question], LONG)[0] for question in QUESTIONS]
    assert [drafting.complete([question], LONG)[0] for question in QUESTIONS] == wanted
    assert metric(drafting, "vllm:num_preemptions_total") == 0
    assert drafting.complete(QUESTIONS, LONG) == wanted
    assert metric(drafting, "vllm:num_preemptions_total") > 0


def test_a_stream_is_that_of_plain_vllm(plain: VllmServer, drafting: VllmServer):
    """The chat template's special tokens stand in the prompt, and the text ends by itself."""
    assert [drafting.ask(question, 60).ids for question in QUESTIONS] == [
        plain.ask(question, 60).ids for question in QUESTIONS
    ]


def test_an_answer_under_a_schema_is_all_that_it_allows(drafting: VllmServer):
    assert json.loads(drafting.ask(QUESTIONS[0], 30, schema='{"const": "sold"}').text) == "sold"


def test_drafts_are_counted_by_vllm_and_by_us(drafting: VllmServer):
    drafting.ask(QUESTIONS[0], 50)
    theirs = metric(drafting, "vllm:spec_decode_num_draft_tokens_total")
    accepted = metric(drafting, "vllm:spec_decode_num_accepted_tokens_total")
    assert theirs > 0
    ours = metric(drafting, "omnidraft_spec_decode_num_draft_tokens_total")
    assert ours == pytest.approx(theirs, rel=0.1)  # vLLM does not score what a text that ends was given
    assert metric(drafting, "omnidraft_spec_decode_num_accepted_tokens_total") == pytest.approx(accepted, rel=0.1)


def test_every_answer_is_recorded_with_what_the_target_believed(drafting: VllmServer, settings: config.Settings):
    question = "What is recorded of a question that nobody asked before?"
    heard = drafting.ask(question, 40)

    def recorded() -> list[TraceRecord]:
        said = defaultdict(list)
        for record in records(settings):
            said[record.request_id].append(record)
        texts = [sorted(each, key=lambda record: record.segment) for each in said.values()]
        ids = [([token for record in text for token in record.emitted_ids.tolist()], text) for text in texts]
        return next((text for emitted, text in ids if tuple(emitted[: len(heard.ids)]) == heard.ids), [])

    wait_for(recorded, "the record")
    text = recorded()
    assert all(record.beliefs is not None for record in text)
    assert all(record.target == settings.models.target and record.drafter_prompt_ids.size for record in text)
    first = text[0].beliefs
    assert first is not None
    assert first.top_ids_EK[:, 0].tolist() == text[0].emitted_ids.tolist()  # greedy: what it believed most


def test_nothing_is_left_of_requests_that_ended_or_went_away(drafting: VllmServer):
    """Three hundred short ones, every fourth dropped by its client, many with one prompt (prefix caching)."""

    def ask(number: int) -> None:
        body = {"model": "target", "prompt": QUESTIONS[number % 5], "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{drafting.url}/v1/completions", json=body, timeout=300) as response:
            for _ in response.iter_lines():
                if number % 4 == 0:
                    return

    with ThreadPoolExecutor(16) as clients:
        list(clients.map(ask, range(300)))
    patience_s = IDLE_S + KEEP_S + PATIENCE_S  # vLLM does not say that a text is over: one may come back for so long
    wait_for(lambda: metric(drafting, "omnidraft_followed_texts") == 0, "the end of all texts", patience_s)
    wait_for(lambda: metric(drafting, "omnidraft_drafter_ids") == 0, "the end of all keys")


def test_a_promoted_snapshot_is_taken_up_while_serving(drafting: VllmServer, settings: config.Settings, folder: Path):
    drafting.ask(QUESTIONS[0], 10)
    words = assembly.vocabularies(settings)
    cache = assembly.ngram_cache(settings, words, None)
    made = assembly.identity(settings, words).manifest(None, train="base")
    bundle.write(folder / "snapshot", made, {"serving/ngrams.safetensors": cache.to_arrays()})
    registry = assembly.registry(settings)
    version = registry.publish(folder / "snapshot", None).version
    registry.promote(version)
    wait_for(lambda: metric(drafting, "omnidraft_snapshot_version_info") == version, "the swap")
    drafting.ask("Who drafts now?", 30)
    wait_for(lambda: any(record.snapshot_version == version for record in records(settings)), "a record of it")


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def log_url(request: pytest.FixtureRequest, folder: Path) -> str:
    """A real broker is the second."""
    if request.param == "sqlite":
        return f"sqlite:///{folder / 'stopped.db'}"
    return f"kafka://{request.getfixturevalue('kafka_bootstrap')}"


def test_what_is_under_way_is_recorded_when_the_server_stops(
    folder: Path, settings: config.Settings, home: Path, log_url: str
):
    """vLLM kills its workers at once unless it is given time."""
    log = settings.log.model_copy(update={"url": log_url})
    environment = {
        "OMNIDRAFT_HOME": str(home),
        "OMNIDRAFT_MODELS__DRAFTER": settings.models.drafter,
        "OMNIDRAFT_LOG": log.url,
        "MLFLOW_TRACKING_URI": f"directory:///{folder / 'other-registry'}",
    }
    speculation = custom_class(NUM_TOKENS)
    target = Path(settings.models.target)
    arguments = (*ARGUMENTS, "--shutdown-timeout", "20")
    options = {"speculation": speculation, "settings": environment, "arguments": arguments, "threads": 1}
    with serve(VENV, target, folder / "stopped.log", **options) as server:
        heard = server.ask(QUESTIONS[0], 30)
    logged = settings.model_copy(update={"log": log})
    found: list[TraceRecord] = []
    wait_for(lambda: found.extend(records(logged)) or found, "the record")
    assert [token for record in found for token in record.emitted_ids.tolist()][: len(heard.ids)] == list(heard.ids)


def test_another_version_of_vllm_is_refused_with_what_to_do():
    from omnidraft.errors import ConfigError
    from omnidraft.hosts.vllm import require_version

    require_version("0.32.0")
    require_version("0.32.1+cpu")
    require_version("0.33.0")
    for version in ("0.31.0", "0.34.0", "0.3.2", "1.0.0"):
        with pytest.raises(ConfigError, match=rf"vLLM 0\.32 and 0\.33, found {version}"):
            require_version(version)


def test_a_wrong_setting_stops_the_server_and_says_why(folder: Path, settings: config.Settings, home: Path):
    from omnidraft.errors import ModelError

    environment = {"OMNIDRAFT_HOME": str(home), "OMNIDRAFT_DECODE__POLICY": json.dumps("boldest")}
    target = Path(settings.models.target)
    log_path = folder / "refused.log"
    options = {"speculation": custom_class(NUM_TOKENS), "settings": environment, "arguments": ARGUMENTS, "threads": 1}
    with pytest.raises(ModelError), serve(VENV, target, log_path, **options):
        pass
    assert "setting decode.policy" in log_path.read_text()
