"""Every API refuses what it cannot do before its answer begins: in its own shape, and by the name of the field."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.page_recordings import PASSES
from tests.page_recordings import body as page_body
from tests.tiny_engine import PATIENCE_S

COMPLETIONS, CHATS, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "How many clips"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "How many clips", "max_tokens": 8},
    CHATS: {"messages": ASKED, "max_tokens": 8},
    RESPONSES: {"input": "How many clips", "max_output_tokens": 8},
    MESSAGES: {"messages": ASKED, "max_tokens": 8},
    PASSES: page_body("How many clips"),
    "/tokenize": {},
    "/detokenize": {},
}
STREAM = {"stream": True}
HALF = "\ud800"
"""Half of a surrogate pair: JSON can spell it, and UTF-8 cannot."""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "weather"}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "a"} | function}]}


def said(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [*ASKED, {"role": role, "content": content, **fields}, *ASKED]}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": value}}


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    COMPLETIONS: [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": 5}, "prompt: "),
        ({"prompt": []}, "prompt: "),
        ({"prompt": ["a", 6]}, "prompt.1: "),
        ({"prompt": HALF}, "prompt: "),
        (STREAM | {"prompt": "clips " * 2000}, "maximum context length is 1024 tokens"),
        (STREAM | {"prompt": ["one", "two", "clips " * 1024]}, "maximum context length is 1024 tokens"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt: 128 choices at most (prompts times n), got 130"),
        ({"n": 129}, "n: "),
        ({"n": 0}, "n: "),
        ({"max_tokens": -2}, "max_tokens: "),
        (STREAM | {"max_tokens": "many"}, "max_tokens: "),
        ({"temperature": -1}, "temperature: "),
        ({"temperature": 1e9}, "temperature: "),
        ({"temperature": float("nan")}, "temperature: "),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p: "),
        ({"presence_penalty": 2.5}, "presence_penalty: "),
        ({"repetition_penalty": 0}, "repetition_penalty: "),
        ({"frequency_penalty": float("inf")}, "frequency_penalty: "),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"3": 101}}, "logit_bias of 3"),
        ({"logit_bias": {"-3": 1}}, "logit_bias must be ids from 0"),
        ({"seed": 2**64}, "seed: "),
        ({"stop": ["a"] * 65}, "stop: "),
        ({"stop": ["a", None]}, "stop.1: "),
        ({"stop": 7}, "stop: "),
        ({"speculation": "on"}, "speculation: "),
        ({"speculation": -1}, "speculation: "),
        ({"speculation": 1.5}, "speculation: "),
        ({"logprobs": 21}, "logprobs: "),
        ({"logprobs": -1}, "logprobs: "),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of: "),
        ({"suffix": 5}, "suffix: "),
        ({"suffix": " in May"}, "suffix: the model has no special tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format.type: "),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema_": {}}}}, "json_schema.schema: "),
        ({"response_format": schema({"const": float("nan")})}, "response_format.json_schema.schema: "),
        ({"structured_outputs": {"json": {"const": float("inf")}}}, "structured_outputs.json: "),
        (STREAM | {"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"regex": HALF}}, "regex: character 0"),
        ({"structured_outputs": {"json": {"type": "nope"}}}, "json_schema: "),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "give one of regex, json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "either response_format"),
        ({"prompt": [-1]}, "prompt.0: "),
        ({"prompt": [2**30]}, "prompt must be ids from 0 to"),
        ({"stop_token_ids": [2**30]}, "stop_token_ids must be ids from 0 to"),
        ({"use_beam_search": True}, "no beam search"),
        ({"structured_outputs": {"grammar": "start: ("}}, "lark: "),
    ],
    CHATS: [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (said(5), "messages.1.content: "),
        (said([{"type": "image_url", "image_url": {"url": "x"}}]), "read text only, no 'image_url'"),
        ({"messages": [{"role": "user", "content": "clips " * 1024}]}, "maximum context length is 1024 tokens"),
        ({"logprobs": 5}, "logprobs: "),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: "),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name: "),
        (tool(name="a b"), "tools.0.function.name: "),
        (tool(parameters=3), "tools.0.function.parameters: "),
        (tool(parameters={"default": float("inf")}), "tools.0.function.parameters: "),
        (tool(parameters={"type": "string"}), "tools.0.function.parameters.type must be 'object'"),
        (STREAM | tool(strict=True, parameters={"not": {}}), "parameters of 'a'"),
        (tool(description=HALF), "tools: character 0"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there are 'weather'"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice: "),
        ({"tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: "),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice: "),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{}]}}, "tool_choice: "),
        ({"tool_choice": 5}, "tool_choice: "),
        ({"functions": []}, "functions: "),
        ({"function_call": "auto"}, "tool_choice"),
    ],
    RESPONSES: [
        ({"previous_response_id": "resp_1"}, "stateless"),
        ({"conversation": "conv_1"}, "stateless"),
        ({"background": True}, "stream: true"),
        ({"input": []}, "input"),
        ({"input": "clips " * 1024}, "maximum context length is 1024 tokens"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "no 'input_image'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema_": {}}}}, "text.format.schema_: "),
        ({"text": {"format": {"type": "json_object", "description": HALF}}}, "text: character 0"),
        ({"text": {"format": {"type": "json_schema", "schema": {"const": float("nan")}}}}, "text.format.schema: "),
        ({"tools": [FLAT | {"parameters": {"default": -float("inf")}}]}, "tools.0.parameters: "),
        ({"tools": [FLAT | {"description": HALF}]}, "tools: character 0"),
        ({"tool_choice": FLAT | {"name": HALF}}, "tool_choice: character 0"),
        ({"metadata": {"a": HALF}}, "metadata: character 0"),
        ({"metadata": {HALF: "a"}}, "metadata: character 0"),
        ({"instructions": HALF}, "instructions: character 0"),
    ],
    MESSAGES: [
        ({"max_tokens": None}, "max_tokens"),
        (said([{"type": "image", "source": {}}]), "no 'image'"),
        ({"messages": []}, "messages"),
        (STREAM | {"messages": [{"role": "user", "content": "clips " * 1024}]}, "prompt is too long: "),
        ({"tools": [{"name": "a", "input_schema": {"default": float("nan")}}]}, "tools.0.input_schema: "),
        ({"tool_choice": {"type": "any"}}, "no tools to choose from"),
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice: "),
        (said([{"type": "tool_use", "id": "x", "name": "y", "input": {}}]), "only an assistant calls tools"),
        (said([{"type": "tool_use", "id": "x", "name": "y", "input": {"a": float("inf")}}], "assistant"), "input: "),
        ({"output_config": {"format": {"type": "json_schema", "schema_": {}}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"const": float("nan")}}}}, "format.schema: "),
    ],
    PASSES: [
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "clips " * 1500}]}, "context"),
    ],
    "/tokenize": [
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": ASKED}, "either prompt or messages"),
        ({"prompt": HALF, "add_special_tokens": False}, "surrogate"),
    ],
    "/detokenize": [({"tokens": [10**6]}, "tokens: 1000000"), ({"tokens": [-1]}, "tokens")],
}
ROWS = [(path, fields, named) for path, rows in REFUSED.items() for fields, named in rows]


@pytest.fixture(scope="module")
def client(tiny_engine: Engine) -> Iterator[TestClient]:
    """One application for all of them: nothing that is refused leaves anything behind."""
    requests = RequestQueue(CountingMetrics(), max_waiting=2)
    settings = WorkerSettings(max_body_bytes=20_000)
    with TestClient(application(requests, [ServedModel(tiny_engine, "print")], settings, lambda: b"")) as made:
        yield made
    requests.close(PATIENCE_S)


def refusal(client: TestClient, path: str, content: bytes, status: int) -> dict[str, Any]:
    """The error, in the shape of the path's API."""
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    body = response.json()
    if path == MESSAGES:
        assert body["type"] == "error"
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(("path", "fields", "named"), ROWS, ids=[f"{path} {named}" for path, _, named in ROWS])
def test_a_bad_request_is_refused_by_name(client: TestClient, path: str, fields: dict[str, Any], named: str) -> None:
    error = refusal(client, path, json.dumps(BODIES[path] | fields).encode(), 400)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES, MESSAGES])
def test_a_full_context_has_the_code_or_the_words_by_which_agents_know_that_they_have_to_compact(
    client: TestClient, path: str
) -> None:
    field = {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path)
    long = {field: "clips " * 1024} if field else {"messages": [{"role": "user", "content": "clips " * 1024}]}
    error = refusal(client, path, json.dumps(BODIES[path] | long).encode(), 400)
    if path == MESSAGES:
        told = client.post("/v1/messages/count_tokens", json={"messages": long["messages"]}).json()["input_tokens"]
        assert error["message"] == f"prompt is too long: {told} tokens > 1023 maximum"
    else:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"", 400),
        (b"\xff\xfe{}", 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "' + b"x" * 20_000 + b'"}', 413),
    ],
    ids=["cut off", "no object", "empty", "not UTF-8", "endless number", "too large"],
)
def test_a_body_that_cannot_be_read_is_refused(client: TestClient, path: str, content: bytes, status: int) -> None:
    refusal(client, path, content, status)


def test_what_is_not_served_is_refused_in_the_same_shape(client: TestClient) -> None:
    for path in (COMPLETIONS, "/tokenize"):
        asked = json.dumps({"prompt": "a", "model": "other"}).encode()
        assert refusal(client, path, asked, 404)["code"] == "model_not_found"
    refusal(client, "/v1/nothing", b"{}", 404)
    assert client.get(COMPLETIONS).status_code == client.get(MESSAGES).status_code == 405
    for method, path in (
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/embeddings"),
    ):
        assert client.request(method, path).status_code == 404
