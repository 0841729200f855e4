"""The soak's own bookkeeping: acknowledged requests, and reports of broken assertions."""

import json
from pathlib import Path

import pytest
import typer
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from omnidraft.errors import RequestError
from omnidraft.fleet.request_stats import RequestStats
from tests.http_server import served
from tests.soak import __main__, drift
from tests.soak.acknowledged import AckMonitor
from tests.soak.part import PartResult, SoakPlan


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


def test_the_report_has_the_newest_of_every_part_and_a_broken_promise_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one of an earlier run, and one of a part that did not run to its end."""

    def broken(plan: SoakPlan) -> PartResult:
        return PartResult({"acknowledged_lost": 1}, {"nothing is lost": False})

    def fails(plan: SoakPlan) -> PartResult:
        raise RequestError("no model")

    parts = {"faults": broken, "drift": fails, "fuzz": lambda plan: PartResult({"n": 1}, {"holds": True})}
    monkeypatch.setattr(__main__, "_part", parts.__getitem__)
    app = typer.Typer()
    app.command()(__main__.main)
    for names in ("faults,drift", "fuzz"):
        with pytest.raises(SystemExit) as ended:
            app(["--parts", names, "--out", str(tmp_path)])
        assert ended.value.code == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["broken"] == ["faults: nothing is lost", "drift: drift runs to its end: no model"]
    assert report["acknowledged_lost"] == 1
    assert report["parts"]["fuzz"]["figures"] == {"n": 1}
    assert "BROKEN: faults: nothing is lost" in capsys.readouterr().out


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
