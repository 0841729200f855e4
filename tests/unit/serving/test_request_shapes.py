"""What real clients send is taken: each shape that they were seen to send, with its right answer."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.tiny_engine import PATIENCE_S

Body = dict[str, Any]
Check = Callable[[httpx.Response], None]

HI = [{"role": "user", "content": "Say hi."}]
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
ANTHROPIC_TOOL = {"name": "run", "input_schema": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{}"}}


@dataclass(frozen=True)
class Shape:
    """A request, and what is right about its answer."""

    path: str
    body: Body
    status: int = 200
    ignored: tuple[str, ...] = ()
    """Names that the response header lists, with what may stand behind them."""
    says: str = ""
    """Words of a refusal."""
    check: Check | None = field(default=None, compare=False)


def chat(
    status: int = 200, *, ignored: tuple[str, ...] = (), says: str = "", check: Check | None = None, **fields: Any
) -> Shape:
    return Shape(
        "/v1/chat/completions", {"messages": HI, "max_tokens": 3, "seed": 1} | fields, status, ignored, says, check
    )


def completion(
    status: int = 200, *, ignored: tuple[str, ...] = (), says: str = "", check: Check | None = None, **fields: Any
) -> Shape:
    return Shape(
        "/v1/completions", {"prompt": "abc", "max_tokens": 3, "seed": 1} | fields, status, ignored, says, check
    )


def responses(
    status: int = 200, *, ignored: tuple[str, ...] = (), says: str = "", check: Check | None = None, **fields: Any
) -> Shape:
    return Shape("/v1/responses", {"input": "Say hi.", "max_output_tokens": 3} | fields, status, ignored, says, check)


def messages(
    status: int = 200, *, ignored: tuple[str, ...] = (), says: str = "", check: Check | None = None, **fields: Any
) -> Shape:
    return Shape("/v1/messages", {"messages": HI, "max_tokens": 3} | fields, status, ignored, says, check)


def num_tokens(expected: int) -> Check:
    def check(response: httpx.Response) -> None:
        assert response.json()["usage"]["completion_tokens"] == expected

    return check


def num_prompt_tokens(expected: int) -> Check:
    def check(response: httpx.Response) -> None:
        assert response.json()["usage"]["prompt_tokens"] == expected

    return check


def is_one_of(*texts: str) -> Check:
    def check(response: httpx.Response) -> None:
        assert response.json()["choices"][0]["message"]["content"] in texts

    return check


def matches_schema(response: httpx.Response) -> None:
    assert set(json.loads(response.json()["choices"][0]["message"]["content"])) == {"a"}


def echoes(response: httpx.Response) -> None:
    choice = response.json()["choices"][0]
    assert choice["text"].startswith("abc")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert "".join(logprobs["tokens"]).startswith("abc")
    assert logprobs["text_offset"][0] == 0


def echoes_alone(response: httpx.Response) -> None:
    echoes(response)
    assert response.json()["usage"]["completion_tokens"] == 0


def has_ids(response: httpx.Response) -> None:
    choice = response.json()["choices"][0]
    assert len(choice["token_ids"]) == response.json()["usage"]["completion_tokens"]
    assert choice["prompt_token_ids"]


def has_prediction_usage(response: httpx.Response) -> None:
    details = response.json()["usage"]["completion_tokens_details"]
    assert {"accepted_prediction_tokens", "rejected_prediction_tokens"} <= set(details)


A_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
SOON = [*"aeinst ", "\n"]
"""Where a text stops that nothing limits."""
SHAPES: Mapping[str, Shape] = {
    "limit.none": chat(max_tokens=None, stop=SOON),
    "limit.large": chat(max_completion_tokens=64_000, stop=SOON),
    "limit.minus-one": chat(max_tokens=-1, stop=SOON),
    "limit.float": chat(max_tokens=3.0, check=num_tokens(3)),
    "limit.anthropic": messages(max_tokens=32_000, stop_sequences=SOON),
    "field.unknown": chat(ignored=("made_up",), made_up={"a": 1}),
    "field.reasoning_effort": chat(reasoning_effort="low"),
    "field.verbosity": chat(ignored=("verbosity",), verbosity="low"),
    "field.service_tier": chat(ignored=("service_tier",), service_tier="flex"),
    "field.prompt_cache_retention": chat(ignored=("prompt_cache_retention",), prompt_cache_retention="24h"),
    "field.web_search_options": chat(ignored=("web_search_options",), web_search_options={}),
    "field.temperature-text": chat(temperature="0.5"),
    "field.top_p-0": chat(top_p=0),
    "field.seed-minus-one": chat(seed=-1),
    "field.top_logprobs-0": chat(top_logprobs=0),
    "field.stop-20": chat(stop=[f"stop {number}" for number in range(20)]),
    "field.functions": chat(400, functions=[TOOL["function"]], says="send `tools`"),
    "field.audio": chat(400, modalities=["text", "audio"], audio={"voice": "x", "format": "wav"}, says="text"),
    "field.n": chat(400, n=10_000, says="n"),
    "vllm.neutral-fields": chat(
        ignored=("length_penalty",), use_beam_search=False, length_penalty=1.0, spaces_between_special_tokens=True
    ),
    "vllm.beams": chat(400, use_beam_search=True, says="beam"),
    "vllm.stop_token_ids": chat(stop_token_ids=[5], check=None),
    "vllm.min_tokens": chat(min_tokens=3, check=num_tokens(3)),
    "vllm.skip_special_tokens": chat(skip_special_tokens=False),
    "vllm.include_stop": chat(include_stop_str_in_output=True, stop=["a"]),
    "vllm.allowed_token_ids": chat(allowed_token_ids=[5], check=num_tokens(3)),
    "vllm.bad_words": chat(bad_words=["a"]),
    "vllm.guided_json": chat(guided_json=A_SCHEMA, max_tokens=300, check=matches_schema),
    "vllm.guided_choice": chat(guided_choice=["red", "blue"], max_tokens=9, check=is_one_of("red", "blue")),
    "vllm.guided_regex": chat(guided_regex="red|blue", max_tokens=9, check=is_one_of("red", "blue")),
    "vllm.choice": chat(structured_outputs={"choice": ["red", "blue"]}, max_tokens=9, check=is_one_of("red", "blue")),
    "vllm.grammar": chat(
        structured_outputs={"grammar": 'start: "red" | "blue"'}, max_tokens=9, check=is_one_of("red", "blue")
    ),
    "vllm.priority": chat(priority=1),
    "vllm.truncate": completion(truncate_prompt_tokens=2, check=num_prompt_tokens(2)),
    "vllm.chat_template_kwargs": chat(chat_template_kwargs={"enable_thinking": False}),
    "sglang.regex": chat(regex="red|blue", max_tokens=9, check=is_one_of("red", "blue")),
    "llamacpp.response_format.schema": chat(
        response_format={"type": "json_object", "schema": A_SCHEMA}, max_tokens=300, check=matches_schema
    ),
    "llamacpp.repeat_penalty": chat(repeat_penalty=1.1),
    "openrouter.fields": chat(ignored=("provider", "transforms"), provider={}, transforms=[]),
    "openai.prediction": chat(prediction={"type": "content", "content": "hi"}, check=has_prediction_usage),
    "openai.prediction-parts": chat(
        prediction={"type": "content", "content": [{"type": "text", "text": "hi"}]}, check=has_prediction_usage
    ),
    "completions.echo-logprobs": completion(echo=True, logprobs=1, max_tokens=1, temperature=0, check=echoes),
    "completions.echo-only": completion(echo=True, logprobs=1, max_tokens=0, check=echoes_alone),
    "completions.receipt-of-nothing": completion(400, receipt=True, max_tokens=0, says="no answer to sign"),
    "completions.token-ids": completion(prompt=[5, 6, 7], check=num_prompt_tokens(3)),
    "completions.lists-of-ids": completion(prompt=[[5, 6], [7]], check=num_prompt_tokens(3)),
    "completions.logprobs-10": completion(logprobs=10),
    "completions.20-prompts": completion(prompt=["abc"] * 20, max_tokens=1),
    "openai.stream_options-without-stream": completion(stream_options={"include_usage": True}, check=None),
    "rl.return_token_ids": completion(return_token_ids=True, check=has_ids),
    "tools.long-name": chat(tools=[{"type": "function", "function": {"name": "mcp__" + "a" * 100}}]),
    "tools.dotted-name": chat(tools=[{"type": "function", "function": {"name": "files.read", "parameters": {}}}]),
    "tools.130": chat(  # which are not too many: they are too long
        400,
        tools=[{"type": "function", "function": {"name": f"t{i}", "description": "abc " * 50}} for i in range(130)],
        says="maximum context",
    ),
    "tools.extra-field": chat(tools=[TOOL | {"cache_control": {"type": "ephemeral"}}]),
    "tools.type-null": chat(tools=[{"type": "function", "function": {"name": "a", "parameters": {"type": None}}}]),
    "tools.type-list": chat(
        tools=[{"type": "function", "function": {"name": "a", "parameters": {"type": ["object", "null"]}}}]
    ),
    "tools.empty": chat(tools=[]),
    "tools.custom": chat(ignored=("tools.0",), tools=[{"type": "custom", "custom": {"name": "a"}}]),
    "messages.null-content": chat(messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *HI]),
    "messages.empty-list": chat(messages=[*HI, {"role": "assistant", "content": []}, *HI]),
    "messages.no-calls": chat(messages=[*HI, {"role": "assistant", "content": "a", "tool_calls": []}, *HI]),
    "messages.result-without-call": chat(messages=[*HI, {"role": "tool", "tool_call_id": "x", "content": "sunny"}]),
    "messages.result-without-id": chat(messages=[*HI, {"role": "tool", "content": "sunny"}]),
    "messages.empty-result": chat(
        messages=[
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": None},
        ]
    ),
    "messages.arguments-object": chat(
        messages=[
            *HI,
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "run", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "x"},
        ]
    ),
    "messages.arguments-cut": chat(
        messages=[
            *HI,
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "run", "arguments": '{"a": '}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "x"},
        ]
    ),
    "messages.refusal": chat(
        messages=[*HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *HI]
    ),
    "messages.system-in-the-middle": chat(messages=[*HI, {"role": "system", "content": "Be short."}, *HI]),
    "messages.developer": chat(messages=[{"role": "developer", "content": "Be short."}, *HI]),
    "messages.name": chat(messages=[{"role": "user", "name": "Ann", "content": "Hi"}]),
    "messages.parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]),
    "messages.cache_control-in-part": chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]
    ),
    "messages.image": chat(
        400,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        says="image",
    ),
    "messages.reasoning": chat(messages=[*HI, {"role": "assistant", "content": "a", "reasoning_content": "b"}, *HI]),
    "messages.continue": chat(
        messages=[*HI, {"role": "assistant", "content": "a"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "responses.codex": responses(
        ignored=("client_metadata", "tools.0", "tools.1"),
        reasoning={"summary": "auto"},
        client_metadata={},
        tools=[
            {"type": "namespace", "name": "a", "description": "", "tools": []},
            {"type": "web_search"},
            {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}, "strict": False},
        ],
        include=["reasoning.encrypted_content"],
        store=False,
        stream=False,
        parallel_tool_calls=False,
        prompt_cache_key="x",
    ),
    "responses.result-without-call": responses(
        input=[
            {"type": "message", "role": "user", "content": "a"},
            {"type": "function_call_output", "call_id": "x", "output": "sunny"},
        ]
    ),
    "responses.reasoning-item": responses(
        input=[
            {"type": "message", "role": "user", "content": "a"},
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {"type": "message", "role": "user", "content": "b"},
        ]
    ),
    "responses.custom-call": responses(
        input=[
            {"type": "message", "role": "user", "content": "a"},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        ]
    ),
    "responses.mode": responses(400, mode="quick", says="mode"),
    "responses.store": responses(store=True),
    "responses.allowed_tools": responses(
        tools=[{"type": "function", "name": "run"}, {"type": "function", "name": "walk"}],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "run"}]},
    ),
    "responses.hosted-item": responses(
        ignored=("input.0 (web_search_call)",), input=[{"type": "web_search_call", "id": "w"}, *HI]
    ),
    "responses.previous": responses(400, previous_response_id="resp_1", says="stateless"),
    "anthropic.thinking": messages(thinking={"type": "adaptive"}, context_management={"edits": []}),
    "anthropic.thinking-enabled": messages(thinking={"type": "enabled", "budget_tokens": 1024}),
    "anthropic.thinking-in-history": messages(
        messages=[
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "a"},
                ],
            },
            *HI,
        ]
    ),
    "anthropic.server-tool": messages(
        ignored=("tools.0",), tools=[{"type": "web_search_20250305", "name": "web_search"}, ANTHROPIC_TOOL]
    ),
    "anthropic.deferred-tool": messages(
        tools=[ANTHROPIC_TOOL | {"defer_loading": True, "eager_input_streaming": True}]
    ),
    "anthropic.hosted-block": messages(
        ignored=("content.0 (server_tool_use)",),
        messages=[*HI, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "w"}]}, *HI],
    ),
    "anthropic.tool_reference": messages(
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "x",
                        "content": [{"type": "tool_reference", "tool_name": "run"}],
                    }
                ],
            }
        ]
    ),
    "anthropic.prefill": messages(messages=[*HI, {"role": "assistant", "content": "Well"}]),
    "anthropic.top_k-0": messages(top_k=0),
    "anthropic.user_id": messages(metadata={"user_id": "u" * 400}),
    "anthropic.cache_control": messages(
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    ),
    "anthropic.result-without-call": messages(
        messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "sunny"}]}]
    ),
    "anthropic.model-of-theirs": messages(model="claude-haiku-4-5"),
    "openai.model-of-theirs": chat(model="gpt-4o"),
    "http.trailing-slash": Shape("/v1/chat/completions/", {"messages": HI, "max_tokens": 1}),
    "http.without-v1": Shape("/chat/completions", {"messages": HI, "max_tokens": 1}),
    "errors.context-chat": chat(400, messages=[{"role": "user", "content": "abc " * 20_000}], says="maximum context"),
    "errors.context-messages": messages(
        400, messages=[{"role": "user", "content": "abc " * 20_000}], says="prompt is too long"
    ),
}


@pytest.fixture(scope="module")
def client(tool_engine: Engine) -> Iterator[TestClient]:
    """A worker with its defaults, and any model name meaning its own."""
    requests, settings = (
        RequestQueue(CountingMetrics(), max_waiting=8),
        WorkerSettings(model_aliases={"*": tool_engine.pair.target}),
    )
    app = application(requests, [ServedModel(tool_engine, "print")], settings, lambda: b"")
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made
    requests.close(PATIENCE_S)


@pytest.mark.parametrize("name", SHAPES)
def test_the_request_of_a_real_client_gets_its_right_answer(client: TestClient, name: str) -> None:
    shape = SHAPES[name]
    response = client.post(shape.path, json=shape.body)
    assert response.status_code == shape.status, response.text
    ignored = response.headers.get("x-omnidraft-ignored", "")
    for each in shape.ignored:
        assert each in ignored
    assert shape.says in response.text
    if shape.check is not None:
        shape.check(response)


@pytest.mark.parametrize("name", sorted(name for name, shape in SHAPES.items() if shape.status == 200))
def test_the_same_request_is_answered_in_a_stream(client: TestClient, name: str) -> None:
    shape = SHAPES[name]
    response = client.post(shape.path, json=shape.body | {"stream": True})
    assert response.status_code == 200, response.text
    assert '"error": {' not in response.text
    assert response.text.rstrip().endswith(("[DONE]", "}"))


def test_strict_fields_refuse_what_is_ignored_else(tool_engine: Engine) -> None:
    requests, settings = RequestQueue(CountingMetrics(), max_waiting=8), WorkerSettings(strict_fields=True)
    with TestClient(application(requests, [ServedModel(tool_engine, "print")], settings, lambda: b"")) as client:
        for name in ("field.unknown", "responses.codex", "anthropic.server-tool"):
            response = client.post(SHAPES[name].path, json=SHAPES[name].body)
            assert response.status_code == 400
            assert "is not known here" in response.text
        assert client.post("/v1/chat/completions", json=chat().body).status_code == 200
    requests.close(PATIENCE_S)


def test_a_client_that_looks_whether_anybody_is_there_is_answered(client: TestClient) -> None:
    assert client.head("/").status_code == 200


def test_bare_curl_and_pages_of_this_machine_may_ask(client: TestClient) -> None:
    body, form = json.dumps(chat().body), {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/v1/chat/completions", content=body, headers=form).status_code == 200
    foreign = form | {"origin": "https://example.org"}
    assert client.post("/v1/chat/completions", content=body, headers=foreign).status_code == 400
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = client.options("/v1/chat/completions", headers=asked | {"origin": "http://localhost:3000"})
    assert allowed.headers["access-control-allow-origin"] == "http://localhost:3000"
    refused = client.options("/v1/chat/completions", headers=asked | {"origin": "https://example.org"})
    assert "access-control-allow-origin" not in refused.headers


def test_the_list_of_models_tells_the_context(client: TestClient) -> None:
    models = client.get("/v1/models").json()
    (model,) = models["data"]
    assert models["models"] == []  # Codex cannot read a list without it
    assert model["max_model_len"] == 16_384
    assert model["created"] > 10**9
