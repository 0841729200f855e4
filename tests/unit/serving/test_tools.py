"""Tools over HTTP: calls that match their schemas, the same whole and streamed, and whoever drafts."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from omnidraft import assembly
from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.ports import Sampling
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.tools.parser import parse
from omnidraft.tools.tool_use import tool_use
from tests.http_server import events, served
from tests.tiny_engine import PATIENCE_S, tiny_settings, tiny_worker
from tests.unit.serving.agent_traffic import REQUEST, TOOLS
from tests.unit.tools.templates import MISTRAL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
STOP = {
    "type": "function",
    "function": {"name": "stop", "strict": True, "parameters": {"type": "object", "additionalProperties": False}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "How many clips"}], "max_tokens": 400, "seed": 5}
ENDS = {"logit_bias": {"2": 100}}
"""The end of the turn, as soon as the grammar allows it: random weights would make calls until they are cut off."""
WITH_TOOLS = CHAT | {"tools": [WEATHER, STOP]}


@pytest.fixture(scope="module")
def engine(tool_engine: Engine) -> Engine:
    return tool_engine


@pytest.fixture
def app(engine: Engine) -> Iterator[FastAPI]:
    requests = RequestQueue(CountingMetrics(), max_waiting=4)
    yield application(requests, [ServedModel(engine, "print")], WorkerSettings(), lambda: b"")
    requests.close(PATIENCE_S)


def answer(client: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(client: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    """The choice of a stream, put together as clients do it."""
    content, calls, finish_reason = "", [], None
    for event in events(client.post("/v1/chat/completions", json=body | {"stream": True})):
        for choice in event["choices"]:
            finish_reason = choice["finish_reason"] or finish_reason
            content += choice["delta"]["content"] or ""
            for delta in choice["delta"].get("tool_calls", []):
                if "id" in delta:
                    assert delta["index"] == len(calls)
                    assert delta["type"] == "function"
                    calls.append({"name": delta["function"]["name"], "arguments": ""})
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return {"content": content, "calls": calls, "finish_reason": finish_reason}


def same_shape(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {"content": message["content"] or "", "calls": calls, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize(("choice", "seed"), [("required", 0), (NAMED, 2), ("auto", 3), ("none", 1)])
def test_calls_match_and_are_the_same_whole_streamed_and_undrafted(client: TestClient, choice: Any, seed: int) -> None:
    body = WITH_TOOLS | {"tool_choice": choice, "seed": seed, "mode": "reproducible"}
    body |= ENDS if choice in ("required", NAMED) else {"max_tokens": 100}
    whole = answer(client, body)
    shape = same_shape(whole)
    assert streamed(client, body) == shape
    assert same_shape(answer(client, body | {"speculation": "off"})) == shape
    if choice in ("required", NAMED):
        assert shape["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] is None
    if choice == "none":
        assert shape["calls"] == []
    if shape["finish_reason"] == "tool_calls":
        for call in shape["calls"]:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMA if call["name"] == "weather" else {})
    ids = [call["id"] for call in whole["message"].get("tool_calls", [])]
    assert len(set(ids)) == len(ids)


def with_answer(text: str, engine: Engine) -> dict[str, Any]:
    """A request whose answer a pattern makes this text, since no marker can be drawn."""
    begins = [
        token
        for token, spelled in enumerate(engine.pair.target_tokenizer.vocabulary.token_bytes)
        if spelled[:1] == b"<"
    ]
    bias = dict.fromkeys(map(str, [*begins, *engine.pair.marker_ids.values()]), -100)
    pattern = re.sub(r"([\[\]{}])", r"\\\1", text).replace("\n", r"\n")
    return WITH_TOOLS | {"structured_outputs": {"regex": pattern}, "logit_bias": bias}


CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": [1]}}'
FENCED = f"```json\n{CALL}\n```"


@pytest.mark.parametrize(("text", "num"), [(CALL, 1), (FENCED, 1), (f"{FENCED}\n{FENCED}", 2)], ids=["bare", "1", "2"])
def test_calls_without_markers_as_small_models_write_them_are_calls(
    client: TestClient, engine: Engine, text: str, num: int
) -> None:
    body = with_answer(text, engine)
    shape = same_shape(answer(client, body))
    written = {"name": "weather", "arguments": '{"city": "Rome", "days": [1]}'}
    assert shape == {"content": "", "calls": [written] * num, "finish_reason": "tool_calls"}
    assert streamed(client, body) == shape


@pytest.mark.parametrize("text", ['{"name": "Ada", "arguments": {}}', '```json\n{"name": "weather", "age": 3}\n```'])
def test_other_json_is_content(client: TestClient, engine: Engine, text: str) -> None:
    body = with_answer(text, engine)
    shape = same_shape(answer(client, body))
    assert shape == {"content": text, "calls": [], "finish_reason": "stop"}
    assert streamed(client, body) == shape


def test_a_named_tool_is_called_once_and_without_parallel_calls_so_is_any(client: TestClient) -> None:
    for body in ({"tool_choice": NAMED}, {"tool_choice": "required", "parallel_tool_calls": False}):
        for seed in range(2):
            message = answer(client, WITH_TOOLS | ENDS | body | {"seed": seed})["message"]
            assert len(message["tool_calls"]) == 1


def test_an_answer_that_is_cut_off_says_so(client: TestClient) -> None:
    choice = answer(client, WITH_TOOLS | {"tool_choice": NAMED, "max_tokens": 45})
    assert choice["finish_reason"] == "length"


def test_the_openai_client_calls_answers_and_calls_again(app: FastAPI, engine: Engine) -> None:
    name = engine.pair.target
    with served(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = list(CHAT["messages"])
        ask = {"model": name, "tools": [WEATHER, STOP], "max_tokens": 400, "seed": 1}
        must_call = {"tool_choice": "required", **ENDS}
        first = client.chat.completions.create(messages=messages, **must_call, **ask).choices[0]
        assert first.finish_reason == "tool_calls"
        messages.append(first.message)
        for call in first.message.tool_calls or []:
            json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        second = client.chat.completions.create(messages=messages, tool_choice="none", **ask).choices[0]
        assert second.message.tool_calls is None
        assert second.message.content
        with client.chat.completions.stream(messages=messages, **must_call, **ask) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        for call in final.message.tool_calls or []:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA if call.function.name == "weather" else {})


def test_an_answer_in_a_response_format_is_possible_beside_tools(client: TestClient, engine: Engine) -> None:
    """Biases let it begin as the answer does, not as a call, and end."""
    schema = {"schema": {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}}
    schema["schema"]["additionalProperties"] = False
    body = WITH_TOOLS | {"response_format": {"type": "json_schema", "json_schema": schema}}
    body["logit_bias"] = ENDS["logit_bias"] | {str(engine.pair.target_tokenizer.encode("{")[0]): 100}
    shape = same_shape(answer(client, body))
    assert shape["finish_reason"] == "stop"
    assert json.loads(shape["content"]) == {"n": 7}


def test_a_coding_agents_request_is_answered(client: TestClient) -> None:
    """Every other tool of it is strict."""
    tools = [{**tool, "function": {**tool["function"], "strict": number % 2 == 0}} for number, tool in enumerate(TOOLS)]
    for choice in ("auto", "required"):
        body = REQUEST | {"tools": tools, "tool_choice": choice, "seed": 3, "max_tokens": 60}
        chunks = events(client.post("/v1/chat/completions", json=body))
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        whole = same_shape(answer(client, body | {"stream": False, "stream_options": None}))
        assert streamed(client, body) == whole
        assert {call["name"] for call in whole["calls"]} <= {tool["function"]["name"] for tool in tools}
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # the tools are read once


def test_the_drafter_reads_the_conversation_in_its_own_template(engine: Engine, client: TestClient) -> None:
    """It knows no tools, so they are in its system prompt, and nothing of it fails."""
    drafter = engine.pair.drafter_tokenizer
    definitions = [WEATHER]
    ids = drafter.chat_prompt_ids(CHAT["messages"], definitions, engine.pair.tool_format)
    assert b"# Tools" in drafter.vocabulary.spell(ids)
    body = WITH_TOOLS | {"tool_choice": NAMED, "figures": True}
    assert client.post("/v1/chat/completions", json=body).json()["omnidraft"]["num_scored"] > 0


@pytest.fixture(scope="module")
def special_models(tool_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose tokenizer has the opening marker of calls as a special token, id 0, and a template with it."""
    folder = tmp_path_factory.mktemp("special") / "target"
    shutil.copytree(tool_models[0], folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<|endoftext|>", "[TOOL_CALLS]"))
    (folder / "chat_template.jinja").write_text(MISTRAL)
    return folder, tool_models[1]


@pytest.fixture(scope="module")
def special_engine(special_models: tuple[Path, Path], omnidraft_home: Path) -> Engine:
    return tiny_worker(special_models, omnidraft_home, CountingMetrics()).engine


def test_a_marker_that_spells_nothing_opens_calls(special_engine: Engine) -> None:
    engine = special_engine
    assert engine.pair.tool_format.name == "mistral"
    assert engine.pair.marker_ids == {"[TOOL_CALLS]": 0}
    for num_draft_tokens in (5, 0):
        request = GenerationRequest(
            messages=CHAT["messages"],
            tools=tool_use([WEATHER, STOP], "required"),
            max_new_tokens=400,
            sampling=Sampling(1.0, logit_bias={0: 100, 2: 100}),
            seed=3,
            num_draft_tokens=num_draft_tokens,
        )
        steps = list(engine.stream(request).steps)
        text = "".join(step.text for step in steps)
        assert steps[0].emitted[0] == 0
        assert text.startswith("[TOOL_CALLS]")
        assert parse(text, engine.pair.tool_format, ["weather", "stop"])


def test_log_probabilities_count_a_marker_and_leave_the_stop_token_out(special_engine: Engine) -> None:
    requests = RequestQueue(CountingMetrics(), max_waiting=4)
    app = application(requests, [ServedModel(special_engine, "print")], WorkerSettings(), lambda: b"")
    body = WITH_TOOLS | {"tool_choice": "required", "logprobs": True, "logit_bias": {"0": 100, "2": 100}}
    with TestClient(app) as client:
        response = client.post("/v1/chat/completions", json=body).json()
    requests.close(PATIENCE_S)
    (choice,) = response["choices"]
    assert choice["finish_reason"] == "tool_calls"
    told = [each["token"] for each in choice["logprobs"]["content"]]
    assert told[0] == "id:0"
    assert len(told) == response["usage"]["completion_tokens"] - 1


def test_settings_name_the_format_of_a_target(special_models: tuple[Path, Path], omnidraft_home: Path) -> None:
    settings = tiny_settings(special_models)
    named = settings.models.model_copy(update={"tool_formats": {str(special_models[0]): "llama3"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        engine = assembly.engine(settings.model_copy(update={"models": named}), CountingMetrics()).engine
    assert engine.pair.tool_format.name == "llama3"
    assert engine.pair.marker_ids == {}
