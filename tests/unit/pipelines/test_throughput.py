"""The throughput benchmark over a real HTTP server that streams, decodes nothing and counts what it is sent."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from omnidraft import config
from omnidraft.client import CHAT
from omnidraft.errors import RequestError
from omnidraft.models.hf.tokenizer import load_tokenizer
from pipelines.bench.throughput import __main__ as command
from pipelines.bench.throughput import latency, page, systems
from pipelines.bench.throughput.clients import (
    Tally,
    TimedAnswer,
    TokenEvent,
    Workload,
    chat_body,
    row,
    run_clients,
    spread,
    user,
)
from pipelines.bench.throughput.measurement import Measurement, ThroughputPlan
from pipelines.bench.throughput.systems import Endpoint, ServerSetup
from tests.cli_runs import run_pipeline
from tests.http_server import served

TOKEN_S = 0.01
PREFILL_S = 0.5
LONG = 400
"""Characters from which a prompt takes PREFILL_S, in which nothing else is answered."""


@dataclass
class StreamingServer:
    """Answers with numbers, two tokens an event; a long prompt stops all streams unless it is known."""

    usage_in_events: bool = True
    num_now: int = 0
    most_at_once: int = 0
    prompts: list[str] = field(default_factory=list)
    num_remembered: int = 0
    known: set[str] = field(default_factory=set)
    pass_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post(CHAT)
        async def chat(request: Request) -> Response:
            body = await request.json()
            prompt = body["messages"][0]["content"]
            self.prompts.append(prompt)
            self.num_remembered += body["store"]
            if prompt.endswith("refused"):
                return JSONResponse({}, status_code=400)
            return StreamingResponse(self._events(prompt, body["max_tokens"]), media_type="text/event-stream")

        return app

    async def _events(self, prompt: str, num_tokens: int) -> AsyncIterator[str]:
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            if len(prompt) > LONG and prompt not in self.known:
                async with self.pass_lock:
                    await asyncio.sleep(PREFILL_S)
                self.known.add(prompt)
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
            for num_so_far in range(2, num_tokens + 1, 2):
                async with self.pass_lock:
                    await asyncio.sleep(TOKEN_S)
                usage = {"completion_tokens": num_so_far} if self.usage_in_events else None
                yield _event({"choices": [{"delta": {"content": f"{num_so_far - 1} {num_so_far} "}}], "usage": usage})
            usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
            yield _event({"choices": [], "usage": usage, "system_fingerprint": "none/target"})
            yield "data: [DONE]\n\n"
        finally:
            self.num_now -= 1


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


@pytest.fixture
def server() -> StreamingServer:
    return StreamingServer()


@pytest.fixture
def endpoint(server: StreamingServer) -> Iterator[Endpoint]:
    with served(server.app()) as url:
        yield Endpoint(url, "target", "none")


@pytest.fixture
def work(tiny_models: tuple[Path, Path]) -> Workload:
    return Workload(("How many clips?", "A robe takes 2 bolts."), load_tokenizer(tiny_models[0]))


def plan_of(work: Workload, **options: Any) -> ThroughputPlan:
    defaults: dict[str, Any] = {"clients": [1, 3], "num_prompts": 4, "max_new_tokens": 8, "temperature": 0.0}
    return ThroughputPlan(work, **defaults | {"long_prompt_tokens": None, "second_turn_tokens": None} | options)


def words(text: str) -> int:
    return len(text.split())


def test_so_many_clients_send_every_request_once_and_count_what_fails(
    server: StreamingServer, endpoint: Endpoint
) -> None:
    texts = [f"question {number}" for number in range(7)] + ["refused"]
    bodies = [chat_body(endpoint, [user(text)], 8, 0.0) for text in texts]
    done: list[None] = []
    tally = run_clients(endpoint.url, bodies, 3, lambda: done.append(None))
    assert sorted(server.prompts) == sorted(texts)
    assert server.most_at_once == 3
    assert (len(tally.answers), len(done)) == (7, 8)
    assert "status 400" in tally.errors[0]


@pytest.mark.parametrize("usage_in_events", [True, False])
def test_tokens_of_one_event_share_its_gap(usage_in_events: bool) -> None:
    """By the server's own count, else by the text; the first event's tokens have no gap."""
    server = StreamingServer(usage_in_events)
    with served(server.app()) as url:
        bodies = [chat_body(Endpoint(url, "target", "none"), [user("question")], 8, 0.0)]
        (answer,) = run_clients(url, bodies, 1, lambda: None).answers
    assert answer.text == "1 2 3 4 5 6 7 8 "
    assert answer.num_tokens(words) == 8
    assert answer.first_token_s is not None
    assert answer.first_token_s >= TOKEN_S
    gaps = answer.token_gaps(words)
    assert len(gaps) == 6
    assert sum(gaps) == pytest.approx(answer.events[-1].at_s - answer.events[0].at_s)
    assert gaps[::2] == gaps[1::2]


def test_a_row_is_over_the_time_from_the_first_request_to_the_last_answer() -> None:
    events = [TokenEvent(11.0, "a", 1), TokenEvent(13.0, "b c", 3)]
    first = TimedAnswer(10.0, 13.0, events, {"completion_tokens": 3, "prompt_tokens": 5})
    empty = TimedAnswer(12.0, 14.0, (), {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}})
    made = row("vllm", 2, Tally([first, empty], ["lost"] * 9), words)
    assert made["tokens_per_s"] == 1.0
    assert made["first_token_s"] == {"median": 1.0, "p99": 1.0}
    assert made["gap_s"] == {"median": 1.0, "p99": 1.0}
    counts = ("requests", "tokens", "prompt_tokens", "cached_tokens", "wall_s", "num_errors")
    assert [made[name] for name in counts] == [11, 4, 5, 4, 4.0, 9]
    assert made["errors"] == ["lost"]
    assert spread([float(number) for number in range(1, 201)]) == {"median": 100.5, "p99": 198.0}


def test_rows_of_a_plan_have_at_least_two_requests_a_client(server: StreamingServer, work: Workload) -> None:
    """All prompts differ from their first character on, between rows too, so no server knows one already."""
    plan = plan_of(work)
    assert (plan.num_slots, plan.slot_tokens) == (3, 2048)
    large = plan_of(work, clients=[], long_prompt_tokens=3000)
    assert (large.num_slots, large.slot_tokens) == (5, 3512)
    saved: list[dict[str, Any]] = []
    measurement = Measurement(plan, saved.append)
    with served(server.app()) as url:
        measurement.measure_endpoint("ours", Endpoint(url, "target", "int8"))
    assert [(each["clients"], each["requests"], each["weights"]) for each in measurement.rows] == [
        (1, 4, "int8"),
        (3, 6, "int8"),
    ]
    assert all(each["num_errors"] == 0 and each["tokens"] == 8 * each["requests"] for each in measurement.rows)
    assert all(each["fingerprints"] == ["none/target"] for each in measurement.rows)
    assert len(saved) == 2
    assert len(set(server.prompts)) == len(server.prompts) == 1 + 4 + 3 + 6
    assert server.num_remembered == 0  # the questions behind those beginnings are the same in every row


@pytest.mark.long
def test_a_long_prompt_shows_in_the_largest_gap_of_running_texts(endpoint: Endpoint, work: Workload) -> None:
    figures = latency.long_prompt(endpoint, work, 600, 0.0)
    assert figures["gaps_before"] >= 4 * (latency.USUAL_GAPS - latency.WARM_UP_GAPS)
    assert figures["gap_during_s"]["largest"] >= PREFILL_S / 2
    assert figures["first_token_s"] >= PREFILL_S
    assert figures["growth_s"] == figures["gap_during_s"]["largest"] - figures["gap_before_s"]["largest"]


def test_a_failure_of_the_long_prompt_is_told(work: Workload, server: StreamingServer) -> None:
    measurement = Measurement(plan_of(work, clients=[], long_prompt_tokens=64), lambda _: None)
    with served(FastAPI()) as url:
        measurement.measure_endpoint("ours", Endpoint(url, "target", "int8"))
    assert "status 404" in measurement.figures["long_prompt"]["ours"]["error"]


@pytest.mark.long
def test_a_second_turn_is_compared_with_a_first_turn_of_its_length(endpoint: Endpoint, work: Workload) -> None:
    """The server knows a conversation by its first message."""
    asked: list[None] = []
    figures = latency.second_turn(endpoint, work, 600, 0.0, lambda: asked.append(None))
    assert len(asked) == latency.NUM_REQUESTS
    assert figures["first_token_without_reuse_s"] >= PREFILL_S
    assert figures["times_sooner"] > 1
    assert figures["cached_tokens"] == [3] * latency.TURNS
    ours, others = figures["prompt_tokens"], figures["prompt_tokens_without_reuse"]
    assert ours == pytest.approx(others, rel=0.05)


def test_long_texts_have_the_number_of_tokens_that_was_asked_for(work: Workload) -> None:
    texts = [work.long_text(part, 500) for part in ("a", "b")]
    assert texts[0][:3] != texts[1][:3]
    for text in texts:
        assert work.count_tokens(text) == pytest.approx(500, rel=0.02)


def test_a_server_that_does_not_start_has_rows_with_the_reason(
    tmp_path: Path, work: Workload, tiny_models: tuple[Path, Path]
) -> None:
    """A script stands where a virtual environment has its Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho out of luck; exit 3\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    settings = config.load(None, {}, models={"target": str(tiny_models[0])})
    measurement = Measurement(plan_of(work), lambda _: None)
    measurement.measure("vllm", ServerSetup(settings, None, None, 3, 2048, tmp_path, tmp_path))
    assert [(each["system"], each["clients"], each["tokens_per_s"]) for each in measurement.rows] == [
        ("vllm", 1, None),
        ("vllm", 3, None),
    ]
    assert all("out of luck" in each["errors"][0] for each in measurement.rows)


def test_tables_take_failed_rows_too(capsys: pytest.CaptureFixture[str]) -> None:
    events = [TokenEvent(1.0, "a", 1), TokenEvent(2.0, "b", 2)]
    good = [TimedAnswer(0.0, wall_s, events, {"completion_tokens": 2}) for wall_s in (2.0, 4.0)]
    rows = [{"weights": "int8"} | row("omnidraft", num, Tally([good[num - 1]]), words) for num in (1, 2)]
    rows.append({"weights": None} | row("vllm", 1, Tally(errors=["no such folder"]), words))
    assert [page.scaling(each, rows) for each in rows] == [1.0, 0.5, None]
    page.show({"rows": rows, "long_prompt": {"omnidraft": {"growth_s": 0.1}}, "second_turn": {}})
    shown = capsys.readouterr().out
    assert "growth s" in shown
    assert "vllm, 1 clients, 1 of 1 failed: no such folder" in shown


@pytest.mark.parametrize(("given", "num_slots"), [({}, 24), ({"max_num_seqs": 4}, 4)])
def test_our_server_decodes_all_clients_together_unless_settings_say_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, int], num_slots: int
) -> None:
    """Our server starts with its own default of 16 otherwise, and more clients would wait."""
    started: list[Mapping[str, str]] = []

    @contextmanager
    def http_server(name: str, command: Any, environ: Mapping[str, str], *_: Any) -> Iterator[str]:
        started.append(environ)
        yield "http://127.0.0.1:1"

    monkeypatch.setattr(systems, "_http_server", http_server)
    settings = command._with_slots(config.load(None, {}, scheduler=given), 24)
    with systems.serving("omnidraft", ServerSetup(settings, None, None, 24, 2048, tmp_path, tmp_path)):
        assert config.load(None, started[0]).scheduler.max_num_seqs == num_slots
    assert settings.scheduler.max_num_seqs == num_slots


def test_no_numbers_of_clients_measure_none_and_wrong_ones_are_refused(
    tmp_path: Path,
    omnidraft_home: Path,
    tiny_models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder without Python stands where a virtual environment is: each number of clients would be a failed row."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    target, drafter = tiny_models
    options = ("--systems", "vllm", "--vllm-venv", tmp_path, "--target", target, "--drafter", drafter)
    run_pipeline(command.main, "--clients", "", *options)
    shown = capsys.readouterr()
    assert "vllm: starting" in shown.err
    assert shown.out == ""
    with pytest.raises(RequestError, match="--clients needs numbers from 1 on"):
        run_pipeline(command.main, "--clients", "0", *options)
