"""The parts that pipelines share: their command lines, the HTTP client and pictures."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from omnidraft.cli.choices import numbers
from omnidraft.client import (
    CHAT,
    COMPLETIONS,
    ApiError,
    ConnectionLost,
    OpenAIClient,
    text_of,
)
from omnidraft.demo import report
from omnidraft.errors import RequestError
from omnidraft.pictures import picture
from pipelines.lib import machine
from tests.http_server import served
from tests.snapshot_folders import manifest

ROOT = Path(__file__).parents[3]
COMMANDS = (
    *("bench", "bench_vllm", "record", "drift", "paper_table"),
    *("bench.throughput", "bench.kernels", "measured"),
)
SHOW_HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"pipelines.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert ended.code == 0, name
"""
ROW = {
    "agreement": 0.5,
    "tokens_per_pass": 2.0,
    "tokens_per_s": 20.0,
    "plain_tokens_per_s": 10.0,
    "speedup": 2.0,
    "speedup_interval": (1.8, 2.3),
}


@pytest.mark.long
def test_every_pipeline_is_a_command() -> None:
    """One process shows the help of all of them, so that it imports their libraries once."""
    done = subprocess.run([sys.executable, "-c", SHOW_HELP, *COMMANDS], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.count("Usage:") == len(COMMANDS)


def test_no_pipeline_is_left_out() -> None:
    folder = ROOT / "pipelines"
    packages = {".".join(path.parent.relative_to(folder).parts) for path in folder.rglob("__main__.py")}
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    assert packages | modules == set(COMMANDS)


def test_every_pipeline_prints_a_refusal_as_one_line() -> None:
    """`process.entry` does; a bare `typer.run` shows a traceback."""
    assert [path for path in (ROOT / "pipelines").rglob("*.py") if "typer.run(" in path.read_text()] == []


def test_numbers_of_an_option_are_checked() -> None:
    assert numbers("1, 8,1", "--rows") == [1, 8]
    for wrong in ("", "0", "a", "-1", "1.5", "10,x"):
        with pytest.raises(RequestError, match=f"--rows needs numbers from 1 on with commas .* got '{wrong}'"):
            numbers(wrong, "--rows")


def test_the_command_of_a_report_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["start.py", "--registry", "a user's folder"])
    words = ["python", "-m", "pipelines.bench", "--registry", "a user's folder"]
    assert shlex.split(machine.command("pipelines.bench")) == words


def test_a_picture_makes_its_folder_and_is_closed_after_an_error_too(tmp_path: Path) -> None:
    from matplotlib import pyplot

    open_before = pyplot.get_fignums()
    with picture(tmp_path / "plots" / "a.png", ncols=2) as (_, (left, _)):
        left.plot([1, 2])
    assert (tmp_path / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError), picture(tmp_path / "b.png"):
        raise RequestError("no figures")
    assert not (tmp_path / "b.png").exists()
    assert pyplot.get_fignums() == open_before


def test_a_report_is_a_table_and_a_picture(tmp_path: Path) -> None:
    rows = [ROW | {"version": None}, ROW | {"version": 1, "speedup_interval": None}]
    assert report.table(rows).row_count == 2
    measured = {"num_tokens": 5000, "agreement_before": 0.65, "agreement_after": 0.7, "agreement_change_error": 0.01}
    curve = [manifest("s2", held_out_records=16, **measured)]
    assert list(report.curve_table(curve).columns[3].cells) == ["", "+0.050 ± 0.010"]
    report.picture(curve, rows, tmp_path / "report.png", (4.8, 9.7))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


Stream = Callable[[str], list[str]]
"""The texts of the events that the answer to a prompt has."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that does with a request as its prompt says."""
    app = FastAPI()
    first = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'

    @app.post(CHAT)
    async def chat(request: Request) -> Response:
        prompt = (await request.json())["prompt"]
        if prompt == "busy":
            return JSONResponse({}, status_code=429, headers={"Retry-After": "2"})
        if prompt == "whole":
            return JSONResponse({"choices": [{"message": {"content": "ab"}}], "omnidraft": {"num_tokens": 2}})
        ends = {"streamed": "data: [DONE]\n\n", "cut": "", "failed": 'data: {"error": {"message": "no memory"}}\n\n'}
        return StreamingResponse(iter([first, 'data: {"choices": []}\n\n', ends[prompt]]))

    with served(app) as address:
        yield address


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[OpenAIClient]:
    with OpenAIClient(url, timeout_s=10.0) as client:
        yield client


@pytest.fixture
def stream(api: OpenAIClient) -> Stream:
    return lambda prompt: [text_of(event) for event in api.stream(CHAT, {"prompt": prompt})]


def test_a_whole_reply_has_its_text_and_statistics(api: OpenAIClient) -> None:
    reply = api.ask(CHAT, {"prompt": "whole"})
    assert (reply.text, reply.stats["num_tokens"]) == ("ab", 2)
    assert text_of({"choices": [{"text": "completion"}]}) == "completion"


def test_a_stream_yields_its_events(stream: Stream) -> None:
    assert stream("streamed") == ["a", ""]


def test_a_refusal_has_its_status_and_the_seconds_to_wait(api: OpenAIClient, stream: Stream) -> None:
    for send in (lambda: api.ask(CHAT, {"prompt": "busy"}), lambda: stream("busy")):
        with pytest.raises(ApiError, match="status 429") as refused:
            send()
        assert (refused.value.status, refused.value.retry_after_s) == (429, 2.0)


def test_a_stream_that_fails_or_breaks_off_raises(stream: Stream) -> None:
    with pytest.raises(ConnectionLost, match="ended before"):
        stream("cut")
    with pytest.raises(ApiError, match="no memory") as failed:
        stream("failed")
    assert not isinstance(failed.value, ConnectionLost)


def test_nobody_at_the_address_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost), OpenAIClient("http://127.0.0.1:9", timeout_s=1.0) as nobody:
        nobody.ask(COMPLETIONS, {})
