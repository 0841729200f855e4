"""The figures of the HTTP server's measurement, and its clients."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from omnidraft.config import WorkerSettings
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.serve_bench import load, overhead, swap
from pipelines.serve_bench.clients import ClientTally, send_load
from pipelines.serve_bench.server import ServeBenchPlan, serving
from tests.http_server import served
from tests.tiny_engine import PATIENCE_S, tiny_worker

PLAN = ServeBenchPlan(Path("out"), "tiny", "tiny", repeats=3, tokens=11, clients=2, seconds=10, swaps=1)


def test_what_http_adds_is_told_apart_by_request_and_by_token() -> None:
    """2 ms a request, and 0.1 ms for each later token of a stream, beside a library that wavers."""
    seconds = {
        "library, 1 token": [0.010, 0.020, 0.015],
        "whole, 1 token": [0.012, 0.022, 0.017],
        "streamed, 1 token": [0.012, 0.022, 0.017],
        "library": [0.100, 0.200, 0.150],
        "whole": [0.102, 0.202, 0.152],
        "streamed": [0.103, 0.203, 0.153],
    }
    figures = overhead.figures_of(seconds, PLAN.tokens)
    assert figures["request_ms"] == pytest.approx(2.0)
    assert figures["whole_token_ms"] == pytest.approx(0.0, abs=1e-6)
    assert figures["streamed_token_ms"] == pytest.approx(0.1)
    assert all(overhead.assertions(figures | {"same_text": True}).values())
    assert not all(overhead.assertions(figures | {"same_text": True, "streamed_token_ms": 0.3}).values())


def test_memory_that_grows_and_errors_break_a_promise() -> None:
    tally = ClientTally(latencies_s=[0.1, 0.2], num_tokens=5)
    flat = load.figures_of(tally, [50.0] * 10 + [100.0] * 30, PLAN)
    assert flat["rss_growth_share"] == 0
    assert all(load.assertions(flat).values())
    growing = load.figures_of(tally, [float(100 + second) for second in range(40)], PLAN)
    assert growing["rss_growth_share"] > load.MAX_GROWTH
    assert list(load.assertions(growing | {"num_errors": 1}).values()) == [False, False]


def test_the_process_whose_memory_is_measured_is_the_one_that_listens(
    tmp_path: Path, omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    with serving(replace(PLAN, out=tmp_path), "load") as server:
        connections = psutil.Process(server.pid).net_connections()
    ports = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    assert ports == {server.settings.worker.port}


def test_a_client_that_left_got_no_answer() -> None:
    tally = ClientTally(Counter({"whole": 20, "streamed": 10, "gone": 50}))
    figures = load.figures_of(tally, [50.0], PLAN)
    assert figures["answers_per_s"] == pytest.approx(30 / PLAN.seconds)
    assert figures["answers"]["gone"] == 50


def test_a_delay_counts_around_a_swap_only() -> None:
    gaps = [(float(at), 0.010) for at in range(100)] + [(50.5, 0.050), (80.5, 0.200)]
    figures = swap.figures_of(swap.StreamGaps(gaps, {"base/x", "one/x"}), [(50.0, 52.0)])
    assert figures["longest_delay_ms"] == pytest.approx(40.0)
    assert figures["longest_usual_delay_ms"] == pytest.approx(190.0)
    assert all(swap.assertions(figures).values())
    assert not all(swap.assertions(figures | {"longest_delay_ms": 60.0}).values())


@pytest.fixture
def requests() -> Iterator[RequestQueue]:
    queue = RequestQueue(CountingMetrics(), max_waiting=2)
    yield queue
    queue.close(PATIENCE_S)


def test_clients_of_all_kinds_find_nothing_wrong_with_our_server(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, requests: RequestQueue
) -> None:
    # Two texts are decoded and two requests wait, so some of the eight clients are refused at any speed.
    engine = tiny_worker(tiny_models, omnidraft_home, CountingMetrics(), max_num_seqs=2).engine
    app = application(requests, [ServedModel(engine, "print")], WorkerSettings(), lambda: b"")
    tally = ClientTally()
    with served(app) as url:
        send_load(url, 8, 4.0, tally, seed=1)
    assert tally.errors == []
    assert tally.num_refused > 0
    assert len(tally.by_kind) >= 4
    assert threading.active_count() < 50


def test_clients_find_what_is_wrong_with_another() -> None:
    """It fails, and its 429 does not say when to come again."""
    app = FastAPI()

    @app.post("/v1/{rest:path}")
    async def broken(rest: str) -> JSONResponse:
        return JSONResponse({}, status_code=429 if "chat" in rest else 500)

    tally = ClientTally()
    with served(app) as url:
        send_load(url, 2, 0.5, tally, seed=1)
    assert not tally.by_kind
    assert any("status 429" in error for error in tally.errors)
    assert any("status 500" in error for error in tally.errors)
