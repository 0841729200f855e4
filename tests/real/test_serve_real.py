"""The HTTP server in front of a real pair gives the text of transformers' own `generate`."""

from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM

from omnidraft import config, wiring
from omnidraft.config import WorkerSettings
from omnidraft.models.catalog import store
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TARGET, DRAFTER = "qwen2.5-coder-0.5b", "smollm2-135m"
PROMPT, NUM_TOKENS = "def add(first, second):\n", 24


def test_the_text_at_temperature_0_is_that_of_plain_transformers(tmp_path: Path) -> None:
    """Both in float32, where rounding does not decide a token; something is drafted in every pass."""
    models = {"target": TARGET, "drafter": DRAFTER, "precision": "float32"}
    decode = {"policy": "fixed", "num_draft_tokens": 4}
    settings = config.load(None, {}, models=models, decode=decode, log={"url": f"sqlite:///{tmp_path}/log.db"})
    metrics = CountingMetrics()
    worker = wiring.engine(settings, metrics)
    requests = RequestQueue(metrics, max_waiting=1)
    app = application(requests, [ServedModel(worker.engine, worker.target.fingerprint)], WorkerSettings(), lambda: b"")
    asked = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "figures": True}
    with TestClient(app) as client:
        said = client.post("/v1/completions", json=asked).json()
    requests.close(60.0)
    assert said["omnidraft"]["num_scored"] > 0
    tokenizer = worker.engine.pair.target_tokenizer
    ids = tokenizer.prompt_ids(PROMPT)
    del worker, app  # two models of this size need not be in memory at once
    model = AutoModelForCausalLM.from_pretrained(store.resolve(TARGET), dtype=torch.float32)
    prompt = torch.tensor([ids])
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=sorted(tokenizer.stop_ids),
    )
    expected = [token for token in made[0, len(ids) :].tolist() if token not in tokenizer.stop_ids]
    assert said["choices"][0]["text"] == tokenizer.vocabulary.spell(expected).decode()
