"""The soak's own bookkeeping: the kill schedule, acknowledged requests, and reports of broken assertions."""

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse

from omnidraft.client import CHAT
from omnidraft.errors import RequestError
from omnidraft.fleet.request_stats import RequestStats
from tests.cli_runs import run_pipeline
from tests.http_server import served
from tests.soak import __main__, broker_down, drift, kills
from tests.soak.acknowledged import AckMonitor
from tests.soak.load_clients import load
from tests.soak.part import PartResult, SoakPlan
from tests.soak.uninterrupted import same_bits


class Counters:
    """A worker's metrics page."""

    def __init__(self) -> None:
        self.emitted = self.acknowledged = self.dropped = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/metrics")
        def metrics() -> PlainTextResponse:
            lines = [
                "# HELP omnidraft_traces_emitted_total all",
                f"omnidraft_traces_emitted_total {self.emitted}.0",
                f"omnidraft_traces_acknowledged_total {self.acknowledged}.0",
                f'omnidraft_traces_dropped_total{{reason="queue_full"}} {self.dropped}.0',
            ]
            return PlainTextResponse("\n".join(lines))

        return app


def test_a_request_is_acknowledged_when_all_that_was_emitted_is() -> None:
    worker = Counters()
    with served(worker.app()) as url:
        monitor = AckMonitor(url)
        monitor.answered("a", monitor.life)
        worker.emitted = 1
        monitor.poll()
        assert monitor.acknowledged == set()
        worker.acknowledged = 1
        monitor.poll()
        assert monitor.acknowledged == {"a"}
        monitor.answered("b", monitor.life)
        worker.emitted, worker.dropped = 2, 1
        monitor.poll()
        assert monitor.acknowledged == {"a"}


def test_what_another_life_of_the_worker_answered_is_never_taken_for_acknowledged() -> None:
    """Its counters begin at nothing, where as many are acknowledged as emitted."""
    worker = Counters()
    with served(worker.app()) as url:
        monitor = AckMonitor(url)
        monitor.answered("before", monitor.life)
        asked_in = monitor.life
        worker.emitted, worker.acknowledged = 5, 3
        monitor.poll()
        with monitor.worker_dies():
            asked_meanwhile = monitor.life
        worker.emitted = worker.acknowledged = 0
        monitor.answered("late", asked_in)
        monitor.answered("meanwhile", asked_meanwhile)
        monitor.poll()
        assert monitor.acknowledged == set()
        assert monitor.num_acknowledged == 3
        monitor.answered("after", monitor.life)
        worker.emitted = worker.acknowledged = 1
        monitor.poll()
        assert monitor.acknowledged == {"after"}


def test_clients_end_with_the_part_that_fails() -> None:
    """Nobody answers: threads that went on asking would keep the process alive."""
    url = "http://127.0.0.1:9"
    clients = load(url, AckMonitor(url), num_clients=2, pause_s=0.0, max_tokens=1)

    def part() -> None:
        with clients as tally:
            while tally.num_tries < 3:
                time.sleep(0.005)
            raise RequestError("the part failed")

    with pytest.raises(RequestError, match="the part failed"):
        part()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("client")]


def test_a_request_under_way_is_answered_at_the_end_and_no_other_is_sent() -> None:
    app, statuses = FastAPI(), iter([503, 503, 503, 200])

    @app.post(CHAT)
    def chat() -> JSONResponse:
        body = {"id": "chatcmpl-1", "system_fingerprint": "base/tiny", "choices": [{"text": "done"}]}
        return JSONResponse(body, next(statuses))

    with (
        served(app) as url,
        load(url, AckMonitor(url), num_clients=1, pause_s=0.0, max_tokens=1) as tally,
    ):
        while not tally.num_tries:
            time.sleep(0.005)
    assert [(prompt, reply.request_id, reply.text) for prompt, reply in tally.replies] == [(0, "1", "done")]
    assert (tally.num_tries, tally.failures) == (4, [])


def test_a_hundred_kills_fall_to_victims_by_their_shares_and_a_seed_gives_the_same() -> None:
    first, again = kills.victims(100, random.Random(3)), kills.victims(100, random.Random(3))
    assert first == again
    assert Counter(first) == kills.SHARES
    assert len(kills.victims(7, random.Random(0))) == 7


def test_a_victim_that_is_not_there_is_passed_over_and_kept() -> None:
    waiting = ["broker", "registry", "broker"]
    assert kills.pick(waiting, lambda name: name == "registry") == "registry"
    assert waiting == ["broker", "broker"]
    assert kills.pick(waiting, lambda name: False) is None


SOUND = {
    "acknowledged_lost": 0,
    "learned_twice": 0,
    "miscounted": 0,
    "corrupt_served": 0,
    "requests_failed": 0,
    "answers": 9,
    "unlearned": 0,
    "uninterrupted": {"weights_equal_bit_for_bit": True},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"acknowledged_lost": 1},
        {"learned_twice": 1},
        {"miscounted": 1},
        {"corrupt_served": 1},
        {"requests_failed": 1},
        {"answers": 0},
        {"unlearned": 1},
        {"uninterrupted": {"weights_equal_bit_for_bit": False}},
    ],
    ids=str,
)
def test_each_fault_breaks_one_promise(wrong: dict[str, object]) -> None:
    assert all(kills.assertions(SOUND).values())
    assert list(kills.assertions(SOUND | wrong).values()).count(False) == 1


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([0.0], [0.0], True),
        ([0.0], [-0.0], False),
        ([float("nan")], [float("nan")], True),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_weights_are_compared_to_the_bit(one: list[float], other: list[float], expected: bool) -> None:
    assert same_bits(torch.tensor(one), torch.tensor(other)) is expected
    assert not same_bits(torch.tensor(one), torch.tensor(one, dtype=torch.bfloat16))
    assert not same_bits(torch.tensor(one), None)


def test_the_report_has_the_newest_of_every_part_and_a_broken_promise_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one of an earlier run, and one of a part that did not run to its end."""

    def broken(plan: SoakPlan) -> PartResult:
        return PartResult({"acknowledged_lost": 1}, {"nothing is lost": False})

    def fails(plan: SoakPlan) -> PartResult:
        raise RequestError("no model")

    parts = {"kills": broken, "drift": fails, "fuzz": lambda plan: PartResult({"n": 1}, {"holds": True})}
    monkeypatch.setattr(__main__, "_part", parts.__getitem__)
    app = typer.Typer()
    app.command()(__main__.main)
    for names in ("kills,drift", "fuzz"):
        with pytest.raises(SystemExit) as ended:
            app(["--parts", names, "--out", str(tmp_path)])
        assert ended.value.code == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["broken"] == ["kills: nothing is lost", "drift: drift runs to its end: no model"]
    assert report["acknowledged_lost"] == 1
    assert report["parts"]["fuzz"]["figures"] == {"n": 1}
    assert "BROKEN: kills: nothing is lost" in capsys.readouterr().out


def test_every_part_is_a_module() -> None:
    assert all(callable(__main__._part(name)) for name in __main__.PARTS)


def test_an_unknown_part_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="no part 'kill'; there are kills, broker-down"):
        run_pipeline(__main__.main, "--parts", "kill")


def test_windows_are_told_in_the_order_in_which_they_were_measured() -> None:
    speeds = (10.0, 9.0, 12.0, 8.0, 11.0)
    measured = list(zip(broker_down.WINDOWS, speeds, strict=True))
    figures = broker_down._figures([(kind, [speed]) for kind, speed in measured])
    assert [(each["kind"], each["tokens_per_s"]) for each in figures["windows"]] == measured
    assert figures["tokens_per_s"] == {"up": 11.0, "stopped": 9.0, "killed": 8.0}


def _traffic(*parts: tuple[int, int]) -> list[RequestStats]:
    """(passes that agreed of 30, number of requests), a second each."""
    agreed = [share for share, number in parts for _ in range(number)]
    return [RequestStats(1000 * second, "t", 1, 30 + each, 1.0, 30, each) for second, each in enumerate(agreed)]


def test_a_fall_and_its_end_are_counted_in_requests_since_the_change() -> None:
    requests = _traffic((24, 40), (18, 12), (23, 20))
    events = [drift.Event(46_500, "drift", "fell"), drift.Event(60_500, "drift_over", "back")]
    figures = drift.figures_of(requests, events, changed_ms=39_500)
    assert (figures["level"], figures["fell_to"]) == (0.8, 0.6)
    assert (figures["told_after_requests"], figures["over_after_requests"]) == (7, 21)
    assert figures["recovered_after_requests"] == 12 + 6  # six of eight requests have to be good again for 0.72
    assert all(drift.assertions(figures).values())


def test_the_end_of_an_earlier_fall_is_not_that_of_this_one() -> None:
    events = [drift.Event(10_000, "drift_over", "back"), drift.Event(46_500, "drift", "fell")]
    figures = drift.figures_of(_traffic((24, 40), (18, 32)), events, changed_ms=39_500)
    assert (figures["told_after_requests"], figures["over_after_requests"]) == (7, None)


def test_an_alarm_before_the_change_and_a_fall_that_nobody_told_are_broken_promises() -> None:
    requests = _traffic((24, 40), (18, 32))
    figures = drift.figures_of(requests, [drift.Event(10_000, "drift", "fell")], changed_ms=39_500)
    assert (figures["alarms_before"], figures["told_after_requests"], figures["recovered_after_requests"]) == (
        1,
        None,
        None,
    )
    assert not any(drift.assertions(figures).values())


def test_the_drift_part_names_two_tasks(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="two names with a comma"):
        run_pipeline(__main__.main, "--parts", "drift", "--tasks", "code", "--out", tmp_path)
