"""OpenAI's client gets the Responses API: items, events in the order that its helpers expect, and nothing kept."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.responses.response_input_item import FunctionCallOutput

from omnidraft.decode.engine import Engine
from omnidraft.errors import ContractError, RequestError
from tests.http_server import stream_parts
from tests.tiny_engine import broken_target

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
NAMED = {"type": "function", "name": "weather"}
BODY: dict[str, Any] = {"input": "How many clips", "max_output_tokens": 8, "seed": 5}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def events(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, numbered without a gap."""
    text = client.post("/v1/responses", json=BODY | {"stream": True} | fields).text
    made = [json.loads(data.removeprefix("data: ")) for _, data in stream_parts(text)]
    assert [each["sequence_number"] for each in made] == list(range(len(made)))
    return made


def test_the_client_gets_the_text_of_a_chat_whole_and_streamed(url: str, client: TestClient, engine: Engine) -> None:
    question = "How many clips were sold? " * 4  # long enough that the keys of its beginning are reused
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    chat = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "seed": 5}).json()
    asked: dict[str, Any] = {"input": question, "instructions": "Be brief.", "max_output_tokens": 8}
    asked |= {"model": engine.pair.target, "extra_body": {"seed": 5}}
    with client_of(url) as made:
        whole = made.responses.create(**asked)
        deltas, last = "", None
        for event in made.responses.create(stream=True, **asked):
            deltas += event.delta if event.type == "response.output_text.delta" else ""
            last = event
    assert whole.output_text == deltas == chat["choices"][0]["message"]["content"] != ""
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert last is not None
    assert last.type == "response.incomplete"
    assert last.response.output_text == deltas
    assert whole.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert whole.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert last.response.usage.input_tokens_details.cached_tokens > 0
    assert (whole.instructions, whole.store) == ("Be brief.", False)


def test_the_stream_helper_of_the_client_parses_an_answer_in_a_schema(url: str, engine: Engine) -> None:
    form = {"format": {"type": "json_schema", "name": "fact", "schema": SCHEMA, "strict": True}}
    asked: dict[str, Any] = {"input": "Rome", "text": form, "extra_body": {"seed": 5}, "max_output_tokens": 60}
    with (
        client_of(url) as made,
        made.responses.stream(model=engine.pair.target, **asked) as stream,
    ):
        response = stream.get_final_response()
    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.output[0].content[0].annotations == []


def test_a_stream_tells_its_items_in_order(client: TestClient) -> None:
    made = events(client)
    kinds = [each["type"].removeprefix("response.") for each in made]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    (item,) = made[-1]["response"]["output"]
    assert item == made[-2]["item"]
    assert {each["item_id"] for each in made if "item_id" in each} == {item["id"]}


def test_a_function_is_called_and_its_output_is_read(tool_url: str, tool_engine: Engine) -> None:
    asked: dict[str, Any] = {"model": tool_engine.pair.target, "tools": [WEATHER], "extra_body": {"seed": 5}}
    question = {"role": "user", "content": "How many clips"}
    with client_of(tool_url) as client:
        first = client.responses.create(input=[question], tool_choice=NAMED, **asked)
        with client.responses.stream(input=[question], tool_choice=NAMED, **asked) as stream:
            streamed = stream.get_final_response()
        (call,) = first.output
        assert (call.type, call.name, call.status, first.status) == (
            "function_call",
            "weather",
            "completed",
            "completed",
        )
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert [(each.name, each.arguments) for each in streamed.output] == [(call.name, call.arguments)]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        last, from_stream = (
            client.responses.create(
                input=[question, *calls, output | {"call_id": calls[0].call_id}],
                tool_choice="none",
                max_output_tokens=8,
                **asked,
            )
            for calls in (first.output, streamed.output)
        )
        parsed = {"type": "output_text", "text": "48", "annotations": [], "parsed": None}  # as `responses.parse` has it
        said = {"type": "message", "role": "assistant", "content": [parsed], "id": "msg_1", "status": "completed"}
        client.responses.create(input=[question, said, question], max_output_tokens=8, **asked)
        again = client.responses.create(
            input=[question, *first.output, output, *last.output, question],
            tool_choice="none",
            max_output_tokens=8,
            **asked,
        )
        [dumped_call, dumped_message] = [each.model_dump() for each in (*first.output, *last.output)]
        dumped_output = FunctionCallOutput.model_validate(output | {"caller": {"type": "direct"}}).model_dump()
        from_dumps = client.responses.create(
            input=[question, dumped_call, dumped_output, dumped_message, question],
            tool_choice="none",
            max_output_tokens=8,
            **asked,
        )
    assert from_dumps.usage.input_tokens == again.usage.input_tokens
    assert [item.type for item in last.output] == [item.type for item in from_stream.output] == ["message"]
    assert again.usage.input_tokens > last.usage.input_tokens > first.usage.input_tokens


def test_a_call_in_a_stream_ends_with_all_of_its_arguments(tool_url: str, tool_engine: Engine) -> None:
    with client_of(tool_url) as client:
        stream = client.responses.create(
            model=tool_engine.pair.target,
            input="How many clips",
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            stream=True,
            extra_body={"seed": 5},
        )
        made = list(stream)
    deltas = [event.delta for event in made if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in made if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments
    assert made[-1].type == "response.completed"


@pytest.mark.parametrize(
    ("error", "code"), [(ContractError("broken"), "server_error"), (RequestError("broken"), "invalid_prompt")]
)
def test_a_failure_within_a_stream_is_a_failed_response(
    engine: Engine, client: TestClient, error: Exception, code: str
) -> None:
    for num_good in (0, 1):
        with broken_target(engine, error, num_good):
            first, _, *_, last = events(client, speculation="off")
        assert first["type"] == "response.created"  # the client raises for a stream that begins otherwise
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == code
    assert "broken" in last["response"]["error"]["message"]
