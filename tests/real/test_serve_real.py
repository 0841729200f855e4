"""The HTTP server in front of a real pair gives the text of transformers' own `generate`."""

import json
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnidraft import assembly, config
from omnidraft.config import WorkerSettings
from omnidraft.decode.prompting import infill_stop_ids
from omnidraft.models.catalog import store
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TARGET, DRAFTER = "qwen2.5-coder-0.5b", "smollm2-135m"
NUM_TOKENS = 24
BEFORE, BEHIND = "def add(first, second):\n", "\n\nassert add(1, 2) == 3\n"


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]
IN_ROME = {"city": "Rome"}


def test_the_tool_call_of_a_small_model_is_one_in_every_protocol(tmp_path: Path) -> None:
    """It writes the JSON alone or in a fence, whatever its template says."""
    models = {"target": TARGET, "drafter": "none", "precision": "int8"}
    worker = assembly.engine(
        config.load(None, {}, models=models, log={"url": f"sqlite:///{tmp_path}/log.db"}), CountingMetrics()
    )
    requests = RequestQueue(CountingMetrics(), max_waiting=4)
    app = application(requests, [ServedModel(worker.engine, "print")], WorkerSettings(), lambda: b"")
    function = {"name": "weather", "description": "Tell the weather of a city.", "parameters": WEATHER}
    with TestClient(app) as client:
        chat = {"messages": QUESTION, "temperature": 0, "tools": [{"type": "function", "function": function}]}
        choice = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
        streamed = client.post("/v1/chat/completions", json=chat | {"stream": True}).text
        responses = {"input": QUESTION, "temperature": 0, "tools": [{"type": "function", **function}]}
        item = client.post("/v1/responses", json=responses).json()["output"][0]
        tool = {"name": "weather", "description": function["description"], "input_schema": WEATHER}
        messages = {"messages": QUESTION, "temperature": 0, "max_tokens": 64, "tools": [tool]}
        message = client.post("/v1/messages", json=messages).json()
    requests.close(60.0)
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == IN_ROME
    assert '"finish_reason":"tool_calls"' in streamed
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "weather", IN_ROME)
    assert message["stop_reason"] == "tool_use"
    assert (message["content"][0]["name"], message["content"][0]["input"]) == ("weather", IN_ROME)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": BEFORE}, BEFORE),
        (
            {"prompt": BEFORE, "suffix": BEHIND},
            f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>",
        ),
    ],
    ids=["continued", "filled in"],
)
def test_the_text_at_temperature_0_is_that_of_plain_transformers(
    tmp_path: Path, fields: dict[str, str], text: str
) -> None:
    """Both in float32, where rounding does not decide a token; something is drafted in every pass."""
    models = {"target": TARGET, "drafter": DRAFTER, "precision": "float32"}
    decode = {"policy": "fixed", "num_draft_tokens": 4}
    settings = config.load(None, {}, models=models, decode=decode, log={"url": f"sqlite:///{tmp_path}/log.db"})
    metrics = CountingMetrics()
    worker = assembly.engine(settings, metrics)
    requests = RequestQueue(metrics, max_waiting=1)
    app = application(requests, [ServedModel(worker.engine, worker.target.fingerprint)], WorkerSettings(), lambda: b"")
    asked = fields | {"max_tokens": NUM_TOKENS, "temperature": 0, "repetition_penalty": 1, "figures": True}
    with TestClient(app) as client:
        said = client.post("/v1/completions", json=asked).json()
    requests.close(60.0)
    assert said["omnidraft"]["num_scored"] > 0
    tokenizer = worker.engine.pair.target_tokenizer
    ends = sorted(tokenizer.stop_ids | (infill_stop_ids(tokenizer.vocabulary) if "suffix" in fields else frozenset()))
    ids = AutoTokenizer.from_pretrained(store.resolve(TARGET))(text)["input_ids"]
    del worker, app  # two models of this size need not be in memory at once
    model = AutoModelForCausalLM.from_pretrained(store.resolve(TARGET), dtype=torch.float32)
    prompt = torch.tensor([ids])
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=ends,
    )
    expected = [token for token in made[0, len(ids) :].tolist() if token not in ends]
    assert said["choices"][0]["text"] == tokenizer.vocabulary.spell(expected).decode()
