"""Models that think first: their thoughts come apart from the answer, whole and streamed, in the shape of each API."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.http_server import events
from tests.tiny_engine import PATIENCE_S, tiny_worker

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "assistant\n<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
)
ASKED = [{"role": "user", "content": "How many clips"}]
SAYS = {"thinking_token_budget": 5, "structured_outputs": {"regex": r"Three\."}, "max_tokens": 40, "seed": 3}
"""Five tokens of thoughts, whatever they are, and an answer that is known."""


@pytest.fixture(scope="module")
def client(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    target = tmp_path_factory.mktemp("thinking") / "target"
    shutil.copytree(tiny_models[0], target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    engine: Engine = tiny_worker((target, tiny_models[1]), omnidraft_home, CountingMetrics()).engine
    requests = RequestQueue(CountingMetrics(), max_waiting=4)
    with TestClient(application(requests, [ServedModel(engine, "print")], WorkerSettings(), lambda: b"")) as made:
        yield made
    requests.close(PATIENCE_S)


def test_a_chat_has_its_thoughts_beside_its_content(client: TestClient) -> None:
    body = {"messages": ASKED, **SAYS, "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "Three."
    assert message["reasoning"] == message["reasoning_content"] != ""
    num_thoughts = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 5 < num_thoughts <= 5 + len("</think>")
    plain = client.post("/v1/chat/completions", json=body | {"speculation": "off"}).json()
    assert plain["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    deltas = [
        each["choices"][0]["delta"]
        for each in events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    ]
    assert "".join(each.get("reasoning_content") or "" for each in deltas) == message["reasoning"]
    assert "".join(each["content"] or "" for each in deltas) == "Three."


def test_a_schema_and_a_stop_text_are_for_what_is_behind_the_thoughts(client: TestClient) -> None:
    thought = client.post("/v1/chat/completions", json={"messages": ASKED, **SAYS}).json()["choices"][0]["message"]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [{"a": "b"}]}}}
    body = {"messages": ASKED, "thinking_budget": 5, "max_tokens": 60, "seed": 3, "response_format": schema}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": "b"}
    assert message["reasoning"] == thought["reasoning"]
    stopped = {"messages": ASKED, **SAYS, "stop": [thought["reasoning"][1], "e."]}
    message = client.post("/v1/chat/completions", json=stopped).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (thought["reasoning"], "Thre")


def test_a_call_comes_behind_the_thoughts(client: TestClient) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    tool["function"] |= {"strict": True, "parameters": {"type": "object", "additionalProperties": False}}
    body = {
        "messages": ASKED,
        "thinking_token_budget": 5,
        "max_tokens": 200,
        "tools": [tool],
        "tool_choice": "required",
    }
    choice = client.post("/v1/chat/completions", json=body | {"logit_bias": {"2": 100}}).json()["choices"][0]
    assert choice["message"]["reasoning"]
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"look"}


def test_thoughts_may_be_left_out(client: TestClient) -> None:
    body = {"messages": ASKED, **SAYS, "include_reasoning": False}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Three."}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    deltas = [
        each["choices"][0]["delta"]
        for each in events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    ]
    assert all(each.keys() <= {"role", "content"} for each in deltas)
    assert "".join(each["content"] or "" for each in deltas) == "Three."


def test_other_apis_have_a_budget_and_count_thoughts_too(client: TestClient) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    asked = {"messages": ASKED, "max_tokens": 40, "thinking": thinking, "stop_sequences": ["\n"], "seed": 1}
    schema = {"output_config": {"format": {"type": "json_schema", "schema": {"const": 7}}}}
    blocks = client.post("/v1/messages", json=asked | schema).json()["content"]
    assert [each["type"] for each in blocks] == ["thinking", "text"]
    assert blocks[1]["text"] == "7"
    responses = {"input": "How many clips", "max_output_tokens": 9, "seed": 1}
    usage = client.post("/v1/responses", json=responses).json()["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 9


@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_thinking_can_be_turned_off(client: TestClient, off: dict[str, object]) -> None:
    body = {"messages": ASKED, "structured_outputs": {"regex": r"Three\."}, "max_tokens": 40, **off}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] == "Three."
    assert "reasoning_content" not in message


def test_earlier_thoughts_reach_the_template(client: TestClient) -> None:
    thought = {"role": "assistant", "content": "a", "reasoning_content": "b" * 50}
    lengths = [
        client.post("/v1/chat/completions", json={"messages": [*ASKED, each, *ASKED], "max_tokens": 1}).json()
        for each in (thought, {"role": "assistant", "content": "a"})
    ]
    assert lengths[0]["usage"]["prompt_tokens"] > lengths[1]["usage"]["prompt_tokens"]


def test_messages_and_responses_have_blocks_and_items_of_thoughts(client: TestClient) -> None:
    """A random answer never closes its thoughts."""
    asked = {"messages": ASKED, "max_tokens": 6, "seed": 1}
    (block,) = client.post("/v1/messages", json=asked).json()["content"]
    assert block["type"] == "thinking"
    assert block["thinking"]
    streamed = client.post("/v1/messages", json=asked | {"stream": True}).text
    deltas = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    parts = [each["delta"] for each in deltas if each["type"] == "content_block_delta"]
    assert {each["type"] for each in parts} == {"thinking_delta"}
    assert "".join(each["thinking"] for each in parts) == block["thinking"]
    responses = {"input": "How many clips", "max_output_tokens": 6, "seed": 1}
    (item,) = client.post("/v1/responses", json=responses).json()["output"]
    assert item["type"] == "reasoning"
    streamed = client.post("/v1/responses", json=responses | {"stream": True}).text
    assert "response.reasoning_text.delta" in streamed
    assert (
        item["content"][0]["text"]
        in json.loads(streamed.split("data: ")[-1])["response"]["output"][0]["content"][0]["text"]
    )
