"""A chat shows what the engine says, in process and over HTTP, coloured by who drafted it, and ends as expected."""

import io
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Route

from omnidraft.cli.chat import SOURCES, ChatScreen, style_of
from omnidraft.cli.chat_partners import LocalPartner, Message, ServerPartner, Span
from omnidraft.client import ApiError
from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.decode.snapshot.slot import SnapshotSlot
from omnidraft.errors import RequestError
from omnidraft.ports import DraftTree, Noise, Proposer, ProposerSession, Request, Source, TreeLimits
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.cli_runs import run_cli
from tests.http_server import served
from tests.tiny_engine import PATIENCE_S, snapshot, tiny_worker

KEY = "sk-of-a-chat-0123456789"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "seed": 5, "max_new_tokens": 12}
MESSAGES = [{"role": "user", "content": "How many clips"}]


class Terminal(io.StringIO):
    """Takes colours."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def engine(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Engine:
    return tiny_worker(tiny_models, omnidraft_home, CountingMetrics()).engine


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    requests = RequestQueue(CountingMetrics(), max_waiting=4)
    settings = WorkerSettings(api_keys=(ApiKey(key=KEY),))
    with served(application(requests, [ServedModel(engine, "print")], settings, lambda: b"")) as made:
        yield made
    requests.close(PATIENCE_S)


def test_an_answer_is_the_same_in_process_and_over_http_piece_by_piece(url: str, engine: Engine) -> None:
    server = ServerPartner(f"{url}/v1", None, KEY, **SAMPLING)
    over_http = list(server.answer(MESSAGES))
    server.close()
    in_process = list(LocalPartner(engine, **SAMPLING).answer(MESSAGES))
    assert [text for text, _ in over_http] == [text for text, _ in in_process]
    assert {source for _, source in over_http} & set(Source)
    assert {source for _, source in over_http} <= {None, *Source}
    assert server.name == engine.pair.target
    assert server.summary.startswith("12 tokens, ")


@dataclass
class Interrupting(Proposer):
    """Drafts nothing, and presses Ctrl-C while the second token is drafted for."""

    def open(self, request: Request) -> "_Pressing":
        return _Pressing(request.prompt_ids[-1])


@dataclass
class _Pressing(ProposerSession):
    root: int
    num_passes: int = 0

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        self.num_passes += 1
        if self.num_passes == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return DraftTree.empty(self.root)

    def observe(self, emitted: Sequence[int]) -> None:
        self.root = emitted[-1]


def test_ctrl_c_in_a_round_ends_the_answer_after_it_and_the_next_one_is_whole(engine: Engine) -> None:
    partner, shared = LocalPartner(engine, **SAMPLING), engine.slot
    whole = "".join(text for text, _ in partner.answer(MESSAGES))
    engine.slot = SnapshotSlot(snapshot(1, Interrupting()))
    answer = partner.answer(MESSAGES)
    with pytest.raises(KeyboardInterrupt):
        list(answer)
    engine.slot = shared
    assert not engine.has_work
    assert "".join(text for text, _ in partner.answer(MESSAGES)) == whole


@pytest.mark.parametrize(
    ("url_of", "key", "error", "named"),
    [
        (lambda url: url, "sk-nobodys", ApiError, "no such API key"),
        (lambda _: "http://127.0.0.1:9", None, ApiError, "http://127.0.0.1:9"),
        (lambda _: "127.0.0.1:8000", None, RequestError, "--url must be like"),
    ],
)
def test_a_server_that_cannot_be_asked_is_named(
    url: str, url_of: Any, key: str | None, error: type, named: str
) -> None:
    with pytest.raises(error, match=named):
        ServerPartner(url_of(url), None, key, **SAMPLING)


@pytest.mark.parametrize("model", [None, "x"])
def test_a_redirect_is_refused_with_the_address_it_points_to(
    model: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def moved(request: Any) -> RedirectResponse:
        return RedirectResponse(f"https://new.example/base{request.url.path}", 308)

    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with served(Starlette(routes=[Route("/{path:path}", moved, methods=["GET", "POST"])])) as url:
        asked = ["chat", "--url", url, *(("--target", model) if model else ())]
        done = run_cli(asked, monkeypatch, capsys)
    assert (done.returncode, done.stdout.strip()) == (2, "")
    assert "status 308: points to https://new.example/base; take that URL instead\n" in done.stderr


def test_every_source_has_a_colour_and_a_name_and_what_nobody_drafted_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert all(style_of(source).color for source in Source)
    assert style_of(None).color is None
    output = Terminal()
    screen = ChatScreen(output)
    screen.show_beginning("a-model")
    screen.show("clips\x1b[2J", "direct")
    screen.show(" and", None)
    screen.end("12 tokens")
    shown = output.getvalue()
    assert all(label in shown for label, _ in SOURCES.values())
    assert "\x1b[94mclips?[2J\x1b[0m and" in shown
    assert "[12 tokens]" in shown


class Scripted:
    """Answers with its words; one of them may be an interrupt, or an error."""

    name, summary = "scripted", "done"

    def __init__(self, *words: str | Exception | None) -> None:
        self._words = words
        self.heard: list[list[Message]] = []

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, None]:
        self.heard.append(list(messages))
        for word in self._words:
            if word is None:
                raise KeyboardInterrupt
            if isinstance(word, Exception):
                raise word
            yield word, None

    def close(self) -> None:
        self._words = ()


def test_ctrl_c_keeps_what_was_said_and_ctrl_d_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from omnidraft.cli.chat import _talk

    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n  \ntwo\n"))
    partner = Scripted("half", None)
    _talk(partner, "Be brief.")
    assert capsys.readouterr().out == "half\nhalf\n"
    assert [[each["role"] for each in heard] for heard in partner.heard] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert partner.heard[1][2]["content"] == "half"


class Keyboard(io.StringIO):
    """A person's."""

    def isatty(self) -> bool:
        return True


def test_a_person_goes_on_after_an_answer_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from omnidraft.cli.chat import _talk

    monkeypatch.setattr(sys, "stdin", Keyboard("one\ntwo\n"))
    partner = Scripted("half", ApiError("the server has gone"))
    _talk(partner, None)
    assert len(partner.heard) == 2
    assert capsys.readouterr().err == "omnidraft: the server has gone\n" * 2


def test_a_failed_answer_to_a_pipe_is_the_commands_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    failed = run_cli(["chat", "--url", "http://127.0.0.1:9", "--target", "x"], monkeypatch, capsys)
    assert failed.returncode == 2
    assert failed.stderr.startswith("omnidraft: http://127.0.0.1:9")


def test_the_command_prints_plain_answers_where_there_is_no_terminal(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = "".join(text for text, _ in LocalPartner(engine, **SAMPLING).answer(MESSAGES))
    monkeypatch.setattr(sys, "stdin", io.StringIO("How many clips\n"))
    arguments = ["chat", "--url", url, "--seed", 5, "--max-new-tokens", 12]
    done = run_cli(arguments, monkeypatch, capsys, {"OMNIDRAFT_API_KEY": KEY})
    assert (done.returncode, done.stdout) == (0, f"{answer}\n")
    assert "\x1b" not in done.stderr
    refused = run_cli(["chat", "--url", url, "--drafter", "none", "--config", "x.toml"], monkeypatch, capsys)
    assert refused.returncode == 2
    assert "--drafter, --config: what answers at --url has its own" in refused.stderr
