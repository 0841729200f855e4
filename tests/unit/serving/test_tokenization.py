"""Tokens are those that decoding reads, and go back to their text."""

import threading
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.serving import fair_queue
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from tests.http_server import post, served
from tests.tiny_engine import PATIENCE_S

MESSAGES = [{"role": "user", "content": "How many clips"}]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
def test_a_text_goes_to_tokens_and_back(client: TestClient, text: str) -> None:
    told = post(client, "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert told["count"] == len(told["tokens"])
    assert told["token_strs"] is None
    normalised = unicodedata.normalize("NFC", text)  # as the tokenizer does
    assert post(client, "/detokenize", {"tokens": told["tokens"]}) == {"prompt": normalised}


def test_the_tokens_of_a_prompt_are_counted_as_its_usage_counts_them(client: TestClient, engine: Engine) -> None:
    told = post(client, "/tokenize", {"prompt": "How many clips", "return_token_strs": True})
    usage = post(client, "/v1/completions", {"prompt": "How many clips", "max_tokens": 1})["usage"]
    assert told["count"] == len(told["token_strs"]) == usage["prompt_tokens"]
    assert told["max_model_len"] == engine.decoder.target.context_limit
    chat = post(client, "/tokenize", {"messages": MESSAGES, "model": engine.pair.target})
    usage = post(client, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})["usage"]
    assert chat["count"] == usage["prompt_tokens"] > told["count"]


KEYS = ("sk-of-one-client-0123", "sk-of-another-client-0123")
LONG = "How many clips and how many apples"


class Gate:
    """Holds whoever comes to it until it opens."""

    def __init__(self) -> None:
        self.is_reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.is_reached.set()
        assert self.opened.wait(PATIENCE_S)


class Gated:
    """A tokenizer, or its vocabulary, whose work on the long text waits at a gate; its calls are counted."""

    def __init__(self, whole: Any, gate: Gate, method: str, held: Any) -> None:
        self._whole, self._gate, self._method, self._held = whole, gate, method, held
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._whole, name)
        return self._at_gate(found) if name == self._method else found

    def __len__(self) -> int:
        return len(self._whole)

    def _at_gate(self, call: Any) -> Any:
        def held(given: Any, *more: Any) -> Any:
            self.num_calls += 1
            if given == self._held:
                self._gate.wait()
            return call(given, *more)

        return held


@contextmanager
def gated(engine: Engine, tokenizer: Any) -> Iterator[None]:
    """Inside, the engine's target has this tokenizer."""
    whole = engine.pair
    engine.pair = replace(whole, target_tokenizer=tokenizer)
    try:
        yield
    finally:
        engine.pair = whole


@pytest.fixture
def keyed_url(requests: RequestQueue, engine: Engine) -> Iterator[str]:
    """A real server for two clients with a key each."""
    settings = WorkerSettings(api_keys=tuple(ApiKey(key=key) for key in KEYS))
    with served(application(requests, [ServedModel(engine, "print")], settings, lambda: b"")) as made:
        yield made


def ask(url: str, path: str, key: str, timeout_s: float = PATIENCE_S, **body: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=timeout_s).status_code


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_long_prompt_holds_no_other_client(
    keyed_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(fair_queue, "SHORT_BYTES", len(LONG) - 1, raising=False)
    gate, more = Gate(), {"max_tokens": 1} if path == "/v1/completions" else {}
    tokenizer = Gated(engine.pair.target_tokenizer, gate, "prompt_ids", LONG)
    with gated(engine, tokenizer), ThreadPoolExecutor() as threads:
        long = threads.submit(ask, keyed_url, path, KEYS[0], prompt=LONG, **more)
        assert gate.is_reached.wait(PATIENCE_S)
        try:
            assert ask(keyed_url, path, KEYS[1], PATIENCE_S / 2, prompt="clips", **more) == 200
            assert not long.done()
        finally:
            gate.opened.set()
        assert long.result() == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_event_loop_runs_while_an_answer_is_written(keyed_url: str, engine: Engine, path: str) -> None:
    ids = engine.pair.target_tokenizer.encode(LONG)
    gate, whole = Gate(), engine.pair.target_tokenizer
    vocabulary = Gated(whole.vocabulary, gate, "spell", (ids[-1],) if path == "/tokenize" else ids)

    class WithVocabulary:
        def __init__(self) -> None:
            self.vocabulary = vocabulary

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

    body = {"prompt": LONG, "return_token_strs": True} if path == "/tokenize" else {"tokens": ids}
    with gated(engine, WithVocabulary()), ThreadPoolExecutor() as threads:
        writing = threads.submit(ask, keyed_url, path, KEYS[0], **body)
        assert gate.is_reached.wait(PATIENCE_S)
        try:
            for _ in range(3):
                assert httpx.get(f"{keyed_url}/healthz", timeout=PATIENCE_S / 2).status_code == 200
            assert not writing.done()
        finally:
            gate.opened.set()
        assert writing.result() == 200


def test_a_prompt_that_cannot_fit_is_refused_unread(app: FastAPI, engine: Engine) -> None:
    whole = engine.pair.target_tokenizer
    most = engine.decoder.target.context_limit * max(map(len, whole.vocabulary.token_bytes))
    tokenizer = Gated(whole, Gate(), "prompt_ids", None)
    chats = Gated(tokenizer, Gate(), "chat_prompt_ids", None)
    asked = [
        ("/v1/completions", {"prompt": "a" * (most + 1)}, 0),
        ("/v1/completions", {"prompt": "a" * most}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * (most + 1)}]}, 1),
    ]
    with gated(engine, chats), TestClient(app) as client:
        for path, body, num_calls in asked:
            response = client.post(path, json=body)
            assert response.status_code == 400
            assert "context" in response.json()["error"]["message"]
            assert tokenizer.num_calls + chats.num_calls == num_calls


def test_tokens_of_many_pieces_are_written_as_of_one(client: TestClient, engine: Engine) -> None:
    text = "clips and apples " * 1100
    told = post(client, "/tokenize", {"prompt": text, "return_token_strs": True, "add_special_tokens": False})
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) > 4096
    assert "".join(told["token_strs"]) == text
    assert told["tokens"] == engine.pair.target_tokenizer.encode(text)
