"""A worker without a drafter: memory drafts, traces are recorded, and what needs a drafter says so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.errors import ConfigError
from omnidraft.llm import LLM, SamplingParams
from omnidraft.ports import Sampling, Step
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from tests.tiny_engine import tiny_settings

PROMPT = "How many clips did Natalia sell"


@pytest.fixture
def settings(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> config.Settings:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    made = tiny_settings(
        tiny_models,
        log={"url": f"sqlite:///{tmp_path}/log.db"},
        registry={"url": f"directory:///{tmp_path}/registry"},
        recorder={"opted_out": ["private"]},
    )
    return made.model_copy(update={"models": made.models.model_copy(update={"drafter": "none"})})


@pytest.fixture
def engine(settings: config.Settings) -> Engine:
    return assembly.engine(settings, CountingMetrics()).engine


@pytest.fixture
def worker(settings: config.Settings) -> Iterator[assembly.Worker]:
    made = assembly.worker(settings, CountingMetrics())
    yield made
    assert made.producer is not None
    made.producer.close(5.0)


def steps(engine: Engine, **fields: object) -> list[Step]:
    values = {"prompt": PROMPT, "max_new_tokens": 40, "sampling": Sampling(1.0), "seed": 5} | fields
    return list(engine.stream(GenerationRequest(**values)).steps)  # type: ignore[arg-type]


def ids(text: list[Step]) -> list[int]:
    return [token for step in text for token in step.emitted]


def test_the_text_is_that_of_plain_decoding_and_what_was_said_before_is_drafted(engine: Engine) -> None:
    plain = ids(steps(engine, num_draft_tokens=0, is_stored=False))
    first, second = steps(engine, is_stored=True), steps(engine)
    assert ids(first) == ids(second) == plain
    assert len(second) < len(first)
    assert {source for step in second for source in step.tree.sources if source} == {"suffix"}


@pytest.mark.parametrize("hidden", [{"is_stored": False}, {"tenant": "private"}], ids=str)
def test_what_is_not_stored_is_not_remembered(engine: Engine, hidden: dict[str, object]) -> None:
    first, second = steps(engine, **hidden), steps(engine, **hidden)
    assert [len(step.tree) for step in first] == [len(step.tree) for step in second]


def test_another_tenant_is_not_drafted_for_from_it(engine: Engine) -> None:
    first = steps(engine, tenant="one")
    assert [len(step.tree) for step in steps(engine, tenant="other")] == [len(step.tree) for step in first]
    assert len(steps(engine, tenant="one")) < len(first)


def test_a_text_beside_others_is_remembered_for_its_own_scope(engine: Engine) -> None:
    def num_passes(cache_scope: str) -> int:
        request = GenerationRequest(prompt=PROMPT, max_new_tokens=40, sampling=Sampling(1.0), seed=5)
        engine.add_request(request, cache_scope=cache_scope)
        num = 0
        while engine.has_work:
            num += sum(output.step is not None for output in engine.step())
        return num

    first = num_passes("one key")
    assert num_passes("one key") < first
    assert num_passes("another key") == first


def test_an_order_to_forget_drops_all_that_was_said(engine: Engine) -> None:
    first = steps(engine)
    assert len(steps(engine)) < len(first)
    engine.forget_texts()
    engine.step()
    assert len(steps(engine)) == len(first)


def test_its_traces_are_readable_and_name_no_drafter(worker: assembly.Worker, settings: config.Settings) -> None:
    text = ids(steps(worker.engine)) + ids(steps(worker.engine))
    assert worker.producer is not None
    assert worker.producer.close(5.0) == 0
    reader = assembly.log_reader(settings, settings.log.traces_topic)
    reader.seek({})
    messages = reader.poll(100, timeout_s=2.0).messages
    reader.close()
    records = [codec.decode(message.value, message.headers) for message in messages]
    assert [token for record in records for token in record.emitted_ids.tolist()] == text
    assert {(record.drafter, record.alignment, len(record.drafter_prompt_ids)) for record in records} == {
        ("none", "none", 0)
    }


def test_the_distiller_asks_for_a_drafter(settings: config.Settings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a drafter.*models\.drafter is 'none'"):
        assembly.distillation(settings, CountingMetrics(), folder=tmp_path / "learner")


def test_the_python_api_takes_none(tiny_models: tuple[Path, Path], omnidraft_home: Path, monkeypatch) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    llm = LLM(str(tiny_models[0]), "none", models={"precision": "float32"}, decode={"threads": 1})
    prompts = [PROMPT, PROMPT]
    outputs = [llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=30), use_tqdm=False) for _ in range(2)]
    texts = {output.outputs[0].text for each in outputs for output in each}
    assert len(texts) == 1
