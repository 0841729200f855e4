"""HTTP clients get OpenAI's shapes, errors in OpenAI's shape, and a queue that no client can clog."""

import json
import threading
import time
import typing
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest
from anthropic.types import message_create_params
from fastapi.testclient import TestClient
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.errors import ContractError, RequestError
from omnidraft.ports import Request
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.http_server import events
from tests.tiny_engine import PATIENCE_S, Gated, broken_target, snapshot, wait_until

BODY = {"prompt": "How many clips", "max_tokens": 8, "seed": 5}
WITH_STATS = BODY | {"figures": True}
CHAT = {"messages": [{"role": "user", "content": "How many clips"}], "max_tokens": 8, "seed": 5}
JSON = {"content-type": "application/json"}


def refusal(response: httpx.Response, status: int) -> str:
    """The message of an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


def test_the_openai_client_gets_the_same_text_whole_and_streamed(url: str, engine: Engine) -> None:
    name = engine.pair.target
    question = {"role": "user", "content": "How many clips were sold? " * 4}  # long enough that its keys are reused
    asked = CHAT | {"messages": [question], "extra_body": {"cache_salt": "of this test alone"}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [name]
        whole = client.completions.create(model=name, **BODY)
        parts = list(client.completions.create(model=name, stream=True, **BODY))
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text != ""
        assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert whole.system_fingerprint == "base/print"
        chat = client.chat.completions.create(model=name, **asked)
        chunks = list(
            client.chat.completions.create(model=name, stream=True, stream_options={"include_usage": True}, **asked)
        )
        text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
        assert text == chat.choices[0].message.content != whole.choices[0].text
        assert chunks[-1].choices == []
        usage, again = chat.usage, chunks[-1].usage
        assert (again.prompt_tokens, again.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
        assert 0 == usage.prompt_tokens_details.cached_tokens < again.prompt_tokens_details.cached_tokens
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            client.completions.create(model="other", **BODY)


def test_every_chunk_has_the_usage_so_far_when_asked(client: TestClient) -> None:
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    lines = client.post("/v1/completions", json=BODY | options).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    whole = client.post("/v1/completions", json=BODY).json()
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"]


def test_a_response_says_what_it_cost_and_how_to_get_it_again(client: TestClient) -> None:
    """Two texts of 40 tokens without a seed are the same less than once in 1e9 runs."""
    assert "omnidraft" not in client.post("/v1/completions", json=BODY).json()
    long = WITH_STATS | {"max_tokens": 40, "ignore_eos": True}
    body = client.post("/v1/completions", json=long | {"seed": None}).json()
    assert body["usage"]["completion_tokens"] == body["omnidraft"]["num_tokens"] == 40
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    other = client.post("/v1/completions", json=long | {"seed": None, "temperature": 1.0}).json()
    assert other["omnidraft"]["seeds"] != body["omnidraft"]["seeds"]
    again = client.post("/v1/completions", json=long | {"seed": other["omnidraft"]["seeds"][0]}).json()
    assert again["choices"] == other["choices"] != body["choices"]
    plain = client.post("/v1/completions", json=WITH_STATS | {"speculation": "off"}).json()
    drafted = client.post("/v1/completions", json=WITH_STATS).json()
    assert plain["choices"] == drafted["choices"]
    assert plain["omnidraft"]["num_scored"] == 0


def test_a_text_ends_before_its_stop_string_and_after_max_tokens(client: TestClient) -> None:
    whole = client.post("/v1/completions", json=BODY | {"max_tokens": 40}).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    stop = whole["text"][10:13]
    for stops in (stop, [stop, "never said"]):
        cut = client.post("/v1/completions", json=BODY | {"max_tokens": 40, "stop": stops}).json()["choices"][0]
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        assert cut["finish_reason"] == "stop"
    one = client.post("/v1/completions", json=BODY | {"max_tokens": 1}).json()
    assert one["usage"]["completion_tokens"] == 1


def test_penalties_and_biases_of_the_openai_client_shape_the_text_whoever_drafts(url: str, engine: Engine) -> None:
    """A bias of 100 says one token over and over, until a frequency penalty of 2 has taken it back 50 times."""
    name = engine.pair.target
    favourite = engine.pair.target_tokenizer.encode("clips")[0]
    body = BODY | {"max_tokens": 60, "logit_bias": {str(favourite): 100}}
    with_penalty = body | {"frequency_penalty": 2.0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        spelled = engine.pair.target_tokenizer.vocabulary.spell([favourite]).decode()
        text = client.completions.create(model=name, **body).choices[0].text
        assert text == spelled * 60
        text = client.completions.create(model=name, **with_penalty).choices[0].text
        assert text.startswith(spelled * 40)
        assert text != spelled * 60
        plain = client.completions.create(model=name, extra_body={"speculation": "off"}, **with_penalty)
        assert plain.choices[0].text == text
        unusual = {"min_p": 0.3, "top_k": 9, "repetition_penalty": 1.5}
        chats = [
            client.chat.completions.create(
                model=name, presence_penalty=1.0, extra_body=unusual | {"speculation": speculation}, **CHAT
            )
            for speculation in ("auto", "off")
        ]
        assert chats[0].choices[0].message.content == chats[1].choices[0].message.content


def test_a_schema_or_pattern_of_the_openai_client_is_kept_to_whoever_drafts(url: str, engine: Engine) -> None:
    name = engine.pair.target
    schema = {
        "type": "object",
        "properties": {"many": {"enum": [7, 12]}},
        "required": ["many"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    body = CHAT | {"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chats = [
            client.chat.completions.create(model=name, extra_body={"speculation": speculation}, **body).choices[0]
            for speculation in ("auto", "off")
        ]
        assert json.loads(chats[0].message.content)["many"] in (7, 12)
        assert chats[0].message.content == chats[1].message.content
        assert chats[0].finish_reason == "stop"
        extra = {"structured_outputs": {"regex": "(yes|no)!{3}"}}
        assert client.completions.create(model=name, extra_body=extra, **BODY).choices[0].text in ("yes!!!", "no!!!")
        body["response_format"] = {"type": "json_object"}
        assert client.chat.completions.create(model=name, **body).choices[0].message.content.lstrip().startswith("{")


def test_a_text_goes_on_behind_its_end_for_a_benchmark_that_asks(client: TestClient, engine: Engine) -> None:
    ends = {str(token): 100.0 for token in engine.pair.target_tokenizer.stop_ids}
    asked = {"prompt": "How many clips", "max_tokens": 8, "logit_bias": ends, "repetition_penalty": None}
    stopped, went_on = (client.post("/v1/completions", json=asked | {"ignore_eos": each}) for each in (None, True))
    assert stopped.json()["usage"]["completion_tokens"] == 1
    assert went_on.json()["usage"]["completion_tokens"] == 8


def test_health_models_and_metrics_answer(client: TestClient) -> None:
    assert client.get("/health").json() == client.get("/healthz").json()
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["object"] == "model"
    assert client.get("/metrics").text == "# metrics\n"


def test_a_client_whose_prompts_wait_to_be_tokenised_gets_a_429_at_last(
    client: TestClient, engine: Engine, metrics: CountingMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_request, gate = engine.decode_request, threading.Event()

    def gated(request: GenerationRequest) -> Request:
        assert gate.wait(PATIENCE_S)
        return decode_request(request)

    monkeypatch.setattr(engine, "decode_request", gated)
    answers: list[httpx.Response] = []
    asking = [
        threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=BODY))) for _ in "12345"
    ]
    for each in asking:
        each.start()
    wait_until(lambda: bool(answers))
    assert "wait to be tokenized already; try again later" in refusal(answers[0], 429)
    assert metrics.value("omnidraft_requests_total", status="QueueFull") == 1
    gate.set()
    for each in asking:
        each.join()
    assert {each.status_code for each in answers[1:]} <= {200, 429}  # of the queue, where the four come at once
    assert client.post("/v1/completions", json=BODY).status_code == 200


def test_the_prompt_of_a_client_that_went_away_is_not_tokenised(
    url: str, engine: Engine, metrics: CountingMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests wait in front of the queue behind the first of them."""
    decode_request, gate, asked = engine.decode_request, threading.Event(), list[str]()

    def gated(request: GenerationRequest) -> Request:
        asked.append(request.prompt or "")
        assert gate.wait(PATIENCE_S)
        return decode_request(request)

    monkeypatch.setattr(engine, "decode_request", gated)
    clients = [HTTPConnection(url.removeprefix("http://")) for _ in range(2)]
    for number, each in enumerate(clients):
        each.request("POST", "/v1/completions", json.dumps(BODY | {"prompt": f"clips {number}"}), JSON)
        wait_until(lambda: bool(asked))
    time.sleep(0.2)  # until the second one waits too, or comes later and meets its end
    clients[1].close()
    time.sleep(0.2)
    gate.set()
    assert clients[0].getresponse().status == 200
    wait_until(lambda: metrics.value("omnidraft_requests_total", status="abandoned") == 1)
    assert asked == ["clips 0"]


def test_a_refused_prompt_is_counted(client: TestClient, metrics: CountingMetrics) -> None:
    refusal(client.post("/v1/completions", json=BODY | {"prompt": "clips " * 2000}), 400)
    assert metrics.value("omnidraft_requests_total", status="ContextExceeded") == 1


def test_seeds_that_the_server_draws_survive_clients_whose_numbers_are_floats(client: TestClient) -> None:
    seeds = client.post("/v1/completions", json=WITH_STATS | {"seed": None, "n": 4}).json()["omnidraft"]["seeds"]
    assert seeds == [int(float(seed)) for seed in seeds]


@pytest.mark.parametrize(
    ("path", "params", "body"),
    [
        ("/v1/completions", completion_create_params.CompletionCreateParamsBase, BODY),
        ("/v1/chat/completions", chat_params.CompletionCreateParamsBase, CHAT),
        ("/v1/responses", response_create_params.ResponseCreateParamsBase, {"input": "clips", "max_output_tokens": 1}),
        ("/v1/messages", message_create_params.MessageCreateParamsBase, CHAT),
    ],
)
def test_every_field_of_the_sdks_is_taken_as_null(client: TestClient, path: str, params: type, body: dict) -> None:
    """Clients and gateways dump typed requests with their nulls."""
    fields = typing.get_type_hints(params, include_extras=True).keys() - body.keys()
    nulls = dict.fromkeys(fields - {"max_tokens"}) if "max_tokens" in body else dict.fromkeys(fields)
    response = client.post(path, json=nulls | body)
    assert response.status_code == 200, response.text


def test_a_body_in_chunks_is_refused_as_soon_as_it_is_too_large(url: str) -> None:
    sent = []

    def chunks() -> Iterator[bytes]:
        for number in range(2000):
            sent.append(number)
            yield b"x" * 10_000

    try:
        response = httpx.post(f"{url}/v1/completions", content=chunks(), headers=JSON, timeout=PATIENCE_S)
        assert "20000 bytes" in refusal(response, 413)
    except (httpx.WriteError, httpx.RemoteProtocolError):
        assert len(sent) < 2000  # the server hung up before the client had listened
    refusal(httpx.post(f"{url}/v1/completions", content=iter([b"x" * 10_000] * 3), headers=JSON), 413)


def test_a_full_queue_says_when_to_come_again_and_health_still_answers(
    engine: Engine, client: TestClient, metrics: CountingMetrics
) -> None:
    proposer = Gated()
    engine.slot.swap(snapshot(1, proposer))
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(client.post("/v1/completions", json=BODY).status_code))
        for _ in range(3)
    ]
    threads[0].start()
    assert proposer.is_reached.wait(PATIENCE_S)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: metrics.value("omnidraft_requests_waiting") == 2)
    response = client.post("/v1/completions", json=BODY)
    assert "try again later" in refusal(response, 429)
    assert int(response.headers["retry-after"]) > 0
    assert client.get("/healthz").status_code == 200
    proposer.gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert statuses == [200, 200, 200]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ],
)
def test_the_urgent_one_of_a_clients_requests_is_decoded_before_those_that_came_earlier(
    engine: Engine, client: TestClient, requests: RequestQueue, path: str, fields: dict[str, Any]
) -> None:
    proposer = Gated()
    engine.slot.swap(snapshot(1, proposer))
    waiting, ended = requests._queues[engine].waiting, []

    def ask(priority: int) -> None:
        assert client.post(path, json=fields | {"priority": priority}).status_code == 200
        ended.append(priority)

    threads = [threading.Thread(target=ask, args=(priority,)) for priority in (0, 7, -7)]
    threads[0].start()
    assert proposer.is_reached.wait(PATIENCE_S)
    for num, thread in enumerate(threads[1:], 1):
        thread.start()
        wait_until(lambda num=num: len(waiting) == num)
    proposer.gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ended == [0, -7, 7]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_away_does_not_hold_the_target(
    engine: Engine, url: str, requests: RequestQueue, metrics: CountingMetrics, is_streamed: bool
) -> None:
    base, proposer = engine.slot.current.proposer, Gated()
    engine.slot.swap(snapshot(1, proposer))
    body = BODY | {"stream": is_streamed, "max_tokens": 64, "temperature": 1.0}
    connection = HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    assert proposer.is_reached.wait(PATIENCE_S)
    connection.close()
    engine.slot.swap(snapshot(2, base))
    wait_until(lambda: all(request.is_abandoned for request in requests._queues[engine].running))
    proposer.gate.set()
    assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE_S).status_code == 200
    assert metrics.value("omnidraft_requests_total", status="abandoned") == 1


@pytest.mark.parametrize("error", [ContractError("broken promise"), RuntimeError("a bug")])
def test_a_decoding_failure_is_a_500_and_the_next_request_is_served(
    engine: Engine, client: TestClient, error: Exception
) -> None:
    """Only our own errors are told: any other may be about a text beside this one."""
    told = str(error) if isinstance(error, ContractError) else f"decoding failed: {type(error).__name__}"
    with broken_target(engine, error, num_good=2):
        failed = client.post("/v1/completions", json=BODY)
        assert told in refusal(failed, 500)
        assert len(failed.headers["x-request-id"]) == len(failed.headers["request-id"]) == 32  # as the log names it
        streamed = events(client.post("/v1/completions", json=BODY | {"stream": True}))
    assert [set(event) == {"error"} for event in streamed] == [*[False] * (len(streamed) - 1), True]
    assert len(streamed) > 1
    assert streamed[-1]["error"]["message"] == told
    assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_stream_that_the_request_itself_ends_says_so(engine: Engine, client: TestClient) -> None:
    with broken_target(engine, RequestError("no token can follow"), num_good=2):
        *begun, last = events(client.post("/v1/completions", json=BODY | {"stream": True}))
    assert begun
    assert (last["error"]["type"], last["error"]["message"]) == ("invalid_request_error", "no token can follow")
