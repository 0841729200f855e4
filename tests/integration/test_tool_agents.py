"""LangChain's tool calls over HTTP: a loop of call, result and answer, as its agents run it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from omnidraft.config import WorkerSettings
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.http_server import served
from tests.tiny_engine import PATIENCE_S, tiny_worker

MAX_TURNS = 3
ENDS = {"logit_bias": {"2": 100}}
"""The end of the turn, as soon as the grammar allows it: the weights are random."""


@tool
def add(a: Literal[1, 2, 3], b: Literal[1, 2, 3]) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(scope="module")
def model(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Iterator[ChatOpenAI]:
    engine = tiny_worker(tiny_models, omnidraft_home, CountingMetrics()).engine
    requests = RequestQueue(CountingMetrics(), max_waiting=4)
    app = application(requests, [ServedModel(engine, "print")], WorkerSettings(), lambda: b"")
    with served(app) as url:
        yield ChatOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            model=engine.pair.target,
            max_tokens=200,
            seed=1,
            max_retries=0,
            stream_usage=True,
            extra_body=ENDS,
        )
    requests.close(PATIENCE_S)


def run_agent(model: ChatOpenAI, messages: list[BaseMessage]) -> list[BaseMessage]:
    """Call, run what was called, and go on, until the model answers; it has to call first and to answer last."""
    for turn in range(MAX_TURNS):
        choice = "none" if turn == MAX_TURNS - 1 else "add"
        answer = model.bind_tools([add], tool_choice=choice, strict=True).invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [add.invoke(call) for call in answer.tool_calls]
    return messages


def test_an_agent_calls_reads_the_results_and_answers(model: ChatOpenAI) -> None:
    messages = run_agent(model, [SystemMessage("You count."), HumanMessage("What is 2 + 3?")])
    answers = [message for message in messages if isinstance(message, AIMessage)]
    assert len(answers) == MAX_TURNS
    assert not any(message.invalid_tool_calls for message in answers)
    for message in answers[:-1]:
        (call,) = message.tool_calls
        assert set(call["args"]) == {"a", "b"}
        assert message.response_metadata["finish_reason"] == "tool_calls"
    assert not answers[-1].tool_calls


def test_a_streamed_call_is_the_one_that_is_not_streamed(model: ChatOpenAI) -> None:
    bound = model.bind_tools([add], tool_choice="add", strict=True)
    messages = [HumanMessage("What is 2 + 3?")]
    whole = bound.invoke(messages)
    chunks = list(bound.stream(messages))
    added = chunks[0]
    for chunk in chunks[1:]:
        added += chunk
    assert [(call["name"], call["args"]) for call in added.tool_calls] == [
        (call["name"], call["args"]) for call in whole.tool_calls
    ]
    assert json.loads(added.tool_call_chunks[0]["args"]) == whole.tool_calls[0]["args"]
    assert added.usage_metadata is not None
