"""A real GGUF file in llama.cpp: sound on this machine, the ids of our tokenizer, drafts that never show."""

import pytest

from omnidraft import assembly, config
from omnidraft.decode.generation import GenerationRequest
from omnidraft.ports import Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from tests.unit.models.tiny_llamacpp import require_llamacpp

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def worker() -> assembly.Worker:
    require_llamacpp()
    models = {"target": "qwen2.5-coder-0.5b", "drafter": "smollm2-135m", "engine": "llamacpp"}
    return assembly.engine(config.load(None, {}, models=models, decode={"policy": "fixed"}), CountingMetrics())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_never_shows_in_a_real_text_and_saves_passes(worker, temperature):
    texts, num_passes = {}, {}
    for num_draft_tokens in (0, 5):
        question = GenerationRequest(
            messages=[{"role": "user", "content": "What is 12 times 12? Think step by step."}],
            max_new_tokens=32,
            sampling=Sampling(temperature),
            seed=5,
            mode="reproducible",
            num_draft_tokens=num_draft_tokens,
        )
        steps = list(worker.engine.stream(question).steps)
        texts[num_draft_tokens] = "".join(step.text for step in steps)
        num_passes[num_draft_tokens] = len(steps)
    assert texts[5] == texts[0]
    assert num_passes[5] < num_passes[0]
    if temperature == 0:
        assert "12" in texts[0]
