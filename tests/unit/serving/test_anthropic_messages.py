"""Anthropic's client gets its own shapes, streams and errors, and the text that a chat request gets."""

import json
import re
from typing import Any

import anthropic
import jsonschema
import pytest
from fastapi.testclient import TestClient
from pydantic_core import to_json

from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.errors import ContractError, RequestError
from omnidraft.serving.anthropic_messages.writer import _content
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.blocks import Block
from omnidraft.serving.request_queue import RequestQueue
from tests.http_server import served, stream_parts
from tests.tiny_engine import broken_target

KEY, FREE_KEY = "sk-of-acme-0123456789", "sk-of-anybody-0123456789"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA, "strict": True}
ASKED = [{"role": "user", "content": "How many clips were sold? " * 4}]
"""Long enough that the keys of its beginning are reused."""
BODY: dict[str, Any] = {"max_tokens": 8, "messages": ASKED, "seed": 5}


def client_of(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def post(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/messages", json=BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which names its type twice."""
    parts = stream_parts(text)
    made = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
    assert all(name == content["type"] for name, content in made)
    return [content for _, content in made]


def test_the_client_gets_the_text_of_a_chat_whole_and_streamed(url: str, client: TestClient, engine: Engine) -> None:
    chat = client.post("/v1/chat/completions", json=BODY).json()
    asked = {"model": engine.pair.target, "max_tokens": 8, "messages": ASKED, "extra_body": {"seed": 5}}
    with client_of(url) as made:
        whole = made.messages.create(**asked)
        with made.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
    (block,) = whole.content
    assert block.text == text == chat["choices"][0]["message"]["content"] != ""
    assert [each.text for each in streamed.content] == [text]
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert (whole.role, whole.type, whole.stop_sequence) == ("assistant", "message", None)
    num_prompt = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert num_prompt == chat["usage"]["prompt_tokens"]
    assert whole.usage.output_tokens == streamed.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert streamed.usage.cache_read_input_tokens > 0
    assert whole._request_id is not None


def test_a_stream_tells_its_blocks_in_order(client: TestClient) -> None:
    kinds = [each["type"] for each in events(client.post("/v1/messages", json=BODY | {"stream": True}).text)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_tool_is_used_and_its_result_is_read(tool_url: str, tool_engine: Engine) -> None:
    choice = {"type": "tool", "name": "weather"}
    asked = {"model": tool_engine.pair.target, "max_tokens": 200, "tools": [WEATHER], "extra_body": {"seed": 5}}
    with client_of(tool_url) as client:
        first = client.messages.create(messages=ASKED, tool_choice=choice, **asked)
        with client.messages.stream(messages=ASKED, tool_choice=choice, **asked) as stream:
            streamed = stream.get_final_message()
        (call,) = first.content
        assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
        jsonschema.validate(call.input, SCHEMA)
        assert [(each.name, each.input) for each in streamed.content] == [(call.name, call.input)]
        assert streamed.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
        result |= {"toolset_name": None}
        last, from_dumps = (
            client.messages.create(
                messages=[*ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}],
                tool_choice={"type": "none"},
                **(asked | {"max_tokens": 8}),
            )
            for said in (first.content, [block.model_dump() for block in first.content])
        )
    assert [block.type for block in last.content] == ["text"]
    assert from_dumps.content[0].text == last.content[0].text


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Par', '{"city": "\\ud83d"}', '{"\\ud83d": 1}', '{"a":' * 254 + "1" + "}" * 254, '{"a":' * 100_000],
    ids=["cut off", "half a pair", "half a pair as a name", "deep", "too deep to read"],
)
def test_arguments_that_cannot_be_sent_are_left_out(arguments: str) -> None:
    call = _content(Block(0, "call", "call_1", "weather", arguments))
    assert call["input"] == {}
    deep = _content(Block(0, "call", "call_1", "weather", '{"a":' * 251 + "1" + "}" * 251))
    assert json.loads(to_json({"content": [call, deep]}))["content"][1]["input"] == deep["input"] != {}


def test_the_tool_runner_sends_the_whole_conversation_after_its_thread_was_refused(
    tool_url: str, tool_engine: Engine, client: TestClient
) -> None:
    refused = client.post("/v1/messages", json=BODY | {"thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (refused.status_code, refused.json()["error"]["details"]) == (400, details)
    with client_of(tool_url) as runner_client:
        runner = runner_client.beta.messages.tool_runner(
            model=tool_engine.pair.target, max_tokens=8, messages=ASKED, tools=[]
        )
        assert runner.until_done().content


def test_the_answer_says_which_stop_sequence_ended_it(client: TestClient) -> None:
    text = post(client, max_tokens=40)["content"][0]["text"]
    stop = re.findall(r"[a-z]{3}", text)[-1]
    cut = post(client, max_tokens=40, stop_sequences=["never said", stop])
    assert cut["content"][0]["text"] == text[: text.index(stop)]
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    streamed = client.post("/v1/messages", json=BODY | {"max_tokens": 40, "stop_sequences": [stop], "stream": True})
    assert events(streamed.text)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_an_answer_in_a_schema_is_json_that_matches_it(client: TestClient) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    answer = post(client, max_tokens=60, output_config={"format": form, "effort": "low"})
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)


def test_tokens_are_counted_as_they_will_be_read(url: str, engine: Engine, client: TestClient) -> None:
    prompt = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": ASKED,
    }
    with client_of(url) as made:
        counted = made.messages.count_tokens(model=engine.pair.target, **prompt).input_tokens
    usage = post(client, **prompt)["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted > client.post("/v1/messages/count_tokens", json={"messages": ASKED}).json()["input_tokens"]


def test_a_first_block_that_differs_from_call_to_call_hides_no_common_prefix(client: TestClient) -> None:
    def read(number: int) -> dict[str, int]:
        billed = {"type": "text", "text": f"x-anthropic-billing-header: cch={number:05};"}
        return post(client, system=[billed, {"type": "text", "text": "Be brief. " * 8}])["usage"]

    first, second = read(1), read(2)
    assert second["cache_read_input_tokens"] > 40 > second["input_tokens"]
    assert first["input_tokens"] + first["cache_read_input_tokens"] == sum(
        post(client, system="Be brief. " * 8)["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


@pytest.mark.parametrize(
    ("error", "kind"), [(ContractError("broken"), "api_error"), (RequestError("broken"), "invalid_request_error")]
)
def test_a_failure_within_a_stream_is_an_error_event(
    engine: Engine, client: TestClient, error: Exception, kind: str
) -> None:
    with broken_target(engine, error, num_good=1):
        response = client.post("/v1/messages", json=BODY | {"stream": True, "speculation": "off"})
    last = events(response.text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    assert "broken" in last["error"]["message"]


def test_a_tenants_key_in_the_clients_header_says_whose_a_request_is(requests: RequestQueue, engine: Engine) -> None:
    keys = (ApiKey(key=KEY, tenant="acme"), ApiKey(key=FREE_KEY))
    app = application(requests, [ServedModel(engine, "print")], WorkerSettings(api_keys=keys), lambda: b"")
    asked = {"model": engine.pair.target, "max_tokens": 2, "messages": ASKED}
    with served(app) as url:
        with client_of(url, KEY) as client:
            assert client.messages.create(metadata={"user_id": "someone"}, **asked).usage.output_tokens <= 2
        with (
            client_of(url, FREE_KEY) as client,
            pytest.raises(anthropic.PermissionDeniedError, match="another API key"),
        ):
            client.messages.create(metadata={"user_id": "ACME"}, **asked)
        with client_of(url, "sk-nobodys") as client, pytest.raises(anthropic.AuthenticationError, match="no such"):
            client.messages.create(**asked)
        with anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0) as client:
            assert client.messages.count_tokens(model=engine.pair.target, messages=ASKED).input_tokens > 0
