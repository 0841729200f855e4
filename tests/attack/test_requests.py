"""No request ends the worker, stalls the others, gets a 5xx for being malformed, or is served and then not recorded."""

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from omnidraft import assembly
from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.hosts.http_server import Deadlines
from omnidraft.ports import DraftTree, Mode, Target, TargetSession, TreeLimits
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.attack.grammar_corpus import bodies
from tests.attack.raw_http import Address, message_of, post, read_all, status_of
from tests.http_server import served
from tests.tiny_engine import PATIENCE_S, tiny_settings

KEY = "sk-for-the-attack-0123"
WITH_KEY = b"Authorization: Bearer " + KEY.encode()
OTHER_KEY = "sk-of-a-bystander-0123"
WITH_OTHER_KEY = b"Authorization: Bearer " + OTHER_KEY.encode()
ASKED = {"prompt": "clips", "max_tokens": 2, "seed": 5}
GOOD = json.dumps(ASKED).encode()
LIMITS = WorkerSettings(
    api_keys=(ApiKey(key=KEY), ApiKey(key=OTHER_KEY)),
    idle_timeout_s=1,
    max_connections=400,
    max_connections_per_address=300,
)
DEADLINES = Deadlines(1.0, 1.0, 1.0)
BODIES = bodies()
HONEST_S = 5.0
"""Within which others are answered, on a busy machine."""


@dataclass
class Worker:
    """The worker's own server, queue, engine and recorder, over tiny models."""

    address: Address
    app: ASGIApp
    metrics: CountingMetrics
    worker: assembly.Worker

    def ask(self, body: bytes) -> bytes:
        return self.address.ask(post(body, WITH_KEY))

    def records(self, counter: str, **labels: str) -> float:
        return self.metrics.value(f"omnidraft_traces_{counter}_total", **labels)


@pytest.fixture(scope="module")
def worker(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("attack")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        urls = {"log": {"url": f"sqlite:///{folder}/log.db"}, "registry": {"url": f"directory:///{folder}/registry"}}
        made = assembly.worker(tiny_settings(tiny_models, **urls), metrics := CountingMetrics())
    requests = RequestQueue(metrics, max_waiting=64)
    app = application(requests, [ServedModel(made.engine, "print")], LIMITS, lambda: b"# metrics\n")
    with served(app, LIMITS, DEADLINES) as url:
        yield Worker(Address.of(url), app, metrics, made)
    requests.close(PATIENCE_S)
    assert made.producer is not None
    made.producer.close(PATIENCE_S)


@pytest.mark.timeout(600)
def test_every_grammar_works_or_is_refused_and_others_are_answered_meanwhile(worker: Worker) -> None:
    statuses, waits_s, is_over = {}, [], threading.Event()

    def others() -> None:
        while not is_over.is_set():
            began_s = time.monotonic()
            assert status_of(worker.ask(GOOD)) == 200
            waits_s.append(time.monotonic() - began_s)
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(others)
        for name, body in BODIES.items():
            statuses[name] = status_of(worker.ask(body))
        is_over.set()
        waiting.result()
    assert set(statuses.values()) == {200, 400}, statuses
    assert len(statuses) == 60
    assert Counter(statuses.values())[200] >= 15, statuses
    for name in ("3,500 chained references", "30,000 properties", "12,000 properties"):
        assert statuses[name] == 400
    assert max(waits_s) < HONEST_S


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("30,000 properties", "body: more than 20000 values"),
        ("12,000 properties", "body: more than 20000 values|at most 65536 are compiled"),
        ("3,500 chained references", "at most 65536 are compiled"),
        ("450 chained references, in few bytes", r"nested or chained too deeply \(SIGSEGV\)"),
        ("slow pattern properties", r"more than 1 s of processor time \(SIGPROF\)"),
        ("deeper objects", "body: nested 804 deep, at most 100"),
    ],
)
def test_a_refusal_says_which_limit_it_was(worker: Worker, name: str, words: str) -> None:
    assert re.search(words, message_of(worker.ask(BODIES[name])))


BROKEN_BODIES = {
    "deep arrays": b"[" * 50_000,
    "deep objects": b'{"a":' * 50_000,
    "deep in a field": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "300,000 numbers": b'{"prompt": [' + b"1," * 300_000 + b"1]}",
    "300,000 lists": b'{"prompt": [' + b"[]," * 300_000 + b"1]}",
    "80,000 fields": b"{" + b",".join(b'"x%d":1' % i for i in range(80_000)) + b"}",
    "15,000 fields": b"{" + b",".join(b'"x%d":1' % i for i in range(15_000)) + b"}",
    "15,000 biases": b'{"prompt": "a", "logit_bias": {' + b",".join(b'"x%d":1' % i for i in range(15_000)) + b"}}",
    "500,000 quotes": b'"' * 500_000,
    "an endless integer": b'{"prompt": "a", "seed": ' + b"9" * 50_000 + b"}",
    "an endless key": b'{"prompt": "a", "logit_bias": {"' + b"9" * 50_000 + b'": 1}}',
    "a large number of choices": b'{"prompt": ["a", "b"], "n": ' + b"9" * 4299 + b"}",
    "an endless float": b'{"prompt": "a", "temperature": ' + b"1" * 50_000 + b".5}",
    "a huge exponent": b'{"prompt": "a", "temperature": 1e999}',
    "an integer beyond floats": b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}",
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "a tiny penalty": b'{"prompt": "a", "repetition_penalty": 5e-324}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "UTF-32": '{"prompt": "a"}'.encode("utf-32"),
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "half a pair in a schema": b'{"prompt": "a", "structured_outputs": {"json": {"const": "\\ud800"}}}',
    "half a pair in a regex": b'{"prompt": "a", "structured_outputs": {"regex": "\\udfff"}}',
    "zero bytes": b"\x00" * 1000,
    "a long user": b'{"prompt": "a", "user": "' + b"u" * 513 + b'"}',
    "a seed beyond 64 bits": b'{"prompt": "a", "seed": 18446744073709551616}',
    "a large top_k": b'{"prompt": "a", "top_k": 2147483648}',
    "nothing": b"",
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
def test_a_body_that_is_none_is_a_400_at_once(worker: Worker, name: str) -> None:
    began_s = time.monotonic()
    response = worker.ask(BROKEN_BODIES[name])
    assert status_of(response) == 400, response[-400:]
    assert message_of(response)
    assert time.monotonic() - began_s < HONEST_S


EXTREMES: tuple[Any, ...] = (
    *(0, 1, -1, 2**31 - 1, 2**31, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**64), 10**40, 10**400),
    *(0.0, -0.0, 5e-324, 1e-300, 1e-5, 0.01, 0.5, 1.0, 2.0, 100.0, 1e308, float("nan"), float("inf")),
    *(
        None,
        True,
        False,
        "",
        "a",
        "auto",
        "off",
        "\ud800",
        "\x00",
        "u" * 256,
        [],
        {},
        [[]],
        ["a"],
        {"3": 1},
        {"3": 1e300},
    ),
)
TAKEN: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 5e-324, 1e-300, 0.7, 100),
    "top_p": (5e-324, 1e-9, 0.5, 1),
    "top_k": (1, 3, 2**31 - 1),
    "min_p": (0, 5e-324, 0.1, 1),
    "repetition_penalty": (0.01, 1.3, 100),
    "presence_penalty": (-2, 0.5, 2),
    "frequency_penalty": (-2, 0.5, 2),
    "logit_bias": ({}, {"3": 100}, {"3": -100, "4": 5e-324}),
    "seed": (0, -1, -(2**63), 2**63, 2**64 - 1),
    "n": (1, 3),
    "user": ("", "a", "u" * 256, "\n", "\U0001f600" * 256, "memory group g"),
    "max_tokens": (1, 9),
    "stop": ("", "a", [], ["a"] * 16, ["", "\x00"]),
    "logprobs": (0, 5),
    "speculation": ("auto", "off", 0, 3, 2**31 - 1),
    "mode": ("fast", "reproducible"),
    "store": (None, True, False),
    "figures": (True, False),
    "stream": (True, False),
    "prompt": ("a", "\x00", ["a", "b"], "\U0001f600"),
    "metadata": ({}, {"a": "b"}),
    "structured_outputs": ({}, {"regex": "a*"}, {"json": {}}),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
}
FIELDS = st.sampled_from(sorted(TAKEN)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.sampled_from(TAKEN[name]) | st.sampled_from(TAKEN[name]) | st.sampled_from(EXTREMES)
    )
)


def test_any_values_get_an_answer_or_a_refusal_and_every_answer_is_recorded(worker: Worker) -> None:
    @settings(max_examples=120, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(FIELDS, max_size=4).map(dict))
    def check(fields: dict[str, Any]) -> None:
        asked = json.dumps(ASKED | fields).encode()
        response = worker.ask(asked)
        statuses[status_of(response)] += 1
        assert status_of(response) in (200, 400, 404), (fields, response[-400:])

    statuses: Counter[int] = Counter()
    check()
    assert min(statuses[200], statuses[400]) >= 20, statuses  # which the modules that are loaded change
    assert_all_recorded(worker)


def assert_all_recorded(worker: Worker) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while worker.records("acknowledged") < worker.records("emitted") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert worker.records("acknowledged") == worker.records("emitted") > 0
    assert worker.records("dropped", reason="invalid") == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 8])
def test_choices_that_end_in_the_same_round_are_all_told_to_their_end(worker: Worker, max_tokens: int) -> None:
    asked = {"prompt": "clips", "max_tokens": max_tokens, "n": 4, "seed": 1, "temperature": 1.5, "speculation": "off"}
    stop_ids = worker.worker.served[0].engine.pair.target_tokenizer.stop_ids
    asked["logit_bias"] = {str(stop): -100 for stop in stop_ids}
    told = json.loads(worker.ask(json.dumps(asked).encode()).partition(b"\r\n\r\n")[2])
    assert [choice["finish_reason"] for choice in told["choices"]] == ["length"] * 4
    assert told["usage"]["completion_tokens"] == 4 * max_tokens


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1])
def test_a_seed_of_64_bits_is_recorded_and_told_so_that_it_gives_the_text_again(worker: Worker, seed: int) -> None:
    asked = {"prompt": "clips", "max_tokens": 8, "temperature": 1.5, "figures": True, "n": 2}
    first = json.loads(worker.ask(json.dumps(asked | {"seed": seed}).encode()).partition(b"\r\n\r\n")[2])
    told = first["omnidraft"]["seeds"]
    assert told[0] == seed % 2**64
    again = json.loads(worker.ask(json.dumps(asked | {"seed": told[0]}).encode()).partition(b"\r\n\r\n")[2])
    assert again["choices"] == first["choices"]
    assert_all_recorded(worker)


# ------------------------------------------------------------------------------------------------ connections


def many_headers(num_bytes: int) -> Iterable[bytes]:
    """Headers without an end, as they are sent."""
    yield b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    for number in range(num_bytes // 100_000):
        yield b"X-%d: " % number + b"a" * 100_000 + b"\r\n"


def long_url(num_bytes: int) -> Iterable[bytes]:
    yield b"GET /v1/models?"
    for _ in range(num_bytes // 100_000):
        yield b"a" * 100_000


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (lambda: many_headers(180_000_000), 431),
        (lambda: long_url(180_000_000), 414),
        (lambda: [b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 40_000 + b"\r\n\r\n"], 431),
        (lambda: [b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"], 414),
        (lambda: [b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 8000 + b"\r\n"], 431),
        (lambda: [b"GET / HTTP/1.1\r\nHos"], 408),
        (lambda: [post(GOOD, WITH_KEY)[:-5]], 408),
        (lambda: [post(b"x" * 2_000_000, WITH_KEY)], 413),
        (lambda: [post(b"x" * 2_000_000)], 401),
        (lambda: [post(b"", WITH_KEY, b"Content-Length: 5")], 400),
        (lambda: [post(b"", b"Transfer-Encoding: chunked", WITH_KEY)], 400),
        (lambda: [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 600 + b"\r\n\r\n"], 400),
        (lambda: [b"GET / HTTP/9\r\n\r\n"], 400),
        (lambda: [b"GET  /  HTTP/1.1\r\n: \r\n\r\n"], 400),
        (lambda: [b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n"], 400),
        (lambda: [b"\x00" * 200_000], 400),
    ],
    ids=[
        *("180 MB of headers", "180 MB of URL", "one long header", "a long URL", "8,000 headers", "half the headers"),
        *("half a body", "a body too large", "the same without a key", "two lengths", "length and chunks", "TLS"),
        *("HTTP/9", "no header", "two hosts", "zeros"),
    ],
)
def test_what_is_no_request_is_refused_with_its_status(worker: Worker, request_bytes: Any, status: int) -> None:
    before = psutil.Process().memory_info().rss
    response = worker.address.ask(request_bytes())
    assert status_of(response) == status, response[:200]
    assert message_of(response)
    assert psutil.Process().memory_info().rss - before < 50_000_000
    assert worker.address.get() == 200


CHUNKED = post(b"", WITH_KEY).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        (b"zz\r\nabc\r\n", 400),
        (b"-5\r\nabc\r\n", 400),
        (b"ffffffffffffffffffffffff\r\n", 400),
        (b"5\r\n" + GOOD, 400),
        (b"1;" + b"x" * 100_000, 431),
        (b"%x\r\n%b\r\n0\r\n" % (len(GOOD), GOOD) + b"a: b\r\n" * 20_000, 431),
        (b"1;" + b"x" * 70_000 + b"\r\n{\r\n", 431),
        (b"%x\r\n%b\r\n0\r\n" % (len(GOOD), GOOD) + b"a: b\r\n" * 15_000 + b"\r\n", 431),
        (b"1\r\n{\r\n" * 2000, 408),
        (b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD), 200),
    ],
    ids=[
        *("no number", "negative", "huge", "wrong length", "extension", "trailers", "whole extension"),
        *("whole trailers", "endless", "good"),
    ],
)
def test_chunks_that_are_none_are_refused(worker: Worker, chunks: bytes, status: int) -> None:
    assert status_of(worker.address.ask(CHUNKED + chunks)) == status
    assert worker.address.get() == 200


def test_junk_behind_a_request_spoils_no_answer_before_it(worker: Worker) -> None:
    request = post(GOOD, WITH_KEY).replace(b"Connection: close\r\n", b"")
    answers = worker.address.ask(request * 3 + b"\x00\x01junk\r\n\r\n").split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"200", b"400"]


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le"


def test_half_sent_requests_leave_and_others_are_answered_meanwhile(worker: Worker) -> None:
    half = [worker.address.connect() for _ in range(290)]
    for client in half:
        client.sendall(HALF)
    assert status_of(worker.ask(GOOD)) == 200
    assert Counter(status_of(read_all(client)) for client in half) == {408: 290}
    assert status_of(worker.ask(GOOD)) == 200
    for client in half:
        client.close()


def test_an_address_holds_no_more_connections_than_it_may(worker: Worker) -> None:
    """The 300 that it holds have all the time they want: 600 more of a slow client are still too many."""
    with served(worker.app, LIMITS, replace(DEADLINES, headers_s=10 * PATIENCE_S)) as url:
        address = Address.of(url)
        held = [address.connect() for _ in range(299)]
        for client in held:
            client.sendall(HALF)
        assert address.get() == 200
        held.append(address.connect())
        more = [address.connect() for _ in range(600)]
        assert Counter(status_of(read_all(client)) for client in more) == {429: 600}
        for client in held + more:
            client.close()


def test_all_connections_together_are_bounded(worker: Worker) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    with served(app, LIMITS.model_copy(update={"max_connections": 5}), DEADLINES) as url:
        address = Address.of(url)
        held = [address.connect() for _ in range(5)]
        response = address.ask(b"")
        assert status_of(response) == 503
        assert b"retry-after" in response
        for client in held:
            client.close()
        time.sleep(0.2)
        assert address.get() == 200


def test_a_body_that_drips_is_given_up(worker: Worker) -> None:
    """A byte every tenth of a second never lets the connection rest, and does not make it last."""
    began_s = time.monotonic()
    with worker.address.connect() as client:
        client.sendall(post(GOOD, WITH_KEY)[: -len(GOOD)])
        client.settimeout(0.1)
        response = b""
        while not response and time.monotonic() - began_s < PATIENCE_S:
            try:
                client.sendall(b" ")
                response = client.recv(65536)
            except TimeoutError:
                continue
    assert status_of(response) == 408
    assert time.monotonic() - began_s < DEADLINES.body_s + HONEST_S


def test_an_idle_connection_is_closed(worker: Worker) -> None:
    with worker.address.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(read_all(client)) == 200  # ... and then the server closes
    with worker.address.connect() as client:
        assert read_all(client) == b""


def test_a_client_that_never_reads_is_given_up_and_costs_no_memory() -> None:
    """Its stream is endless, and as fast as it can be."""
    has_ended = threading.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await send_and_look(send, receive)) and not has_ended.is_set():
                pass
        finally:
            has_ended.set()

    async def send_and_look(send: Send, receive: Receive) -> bool:
        await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
        return not client_has_gone.is_set()

    client_has_gone = threading.Event()
    before = psutil.Process().memory_info().rss
    with served(endless, LIMITS, DEADLINES) as url:
        clients = [Address.of(url).connect() for _ in range(20)]
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(DEADLINES.write_s + 1.0)
        client_has_gone.set()  # what writes to a connection that was given up goes on at once, and ends here
        assert has_ended.wait(PATIENCE_S)
        assert psutil.Process().memory_info().rss - before < 50_000_000
        for client in clients:
            client.close()


# ------------------------------------------------------------------------------------------------ log-probabilities


def test_log_probabilities_of_long_prompts_are_bounded_and_others_are_answered_meanwhile(worker: Worker) -> None:
    """What takes 100 MB for 47 kB of a body would take gigabytes for the largest."""
    long, is_over, waits_s = "How many clips did Natalia sell altogether in April and May? " * 40, threading.Event(), []
    asked = {"prompt": [f"{number} {long}" for number in range(128)], "max_tokens": 1, "prompt_logprobs": 20}

    def others() -> None:
        while not is_over.is_set():
            began_s = time.monotonic()
            assert status_of(worker.address.ask(post(GOOD, WITH_OTHER_KEY))) == 200
            waits_s.append(time.monotonic() - began_s)
            time.sleep(0.02)

    before = psutil.Process().memory_info().rss
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(others)
        try:
            refused = worker.ask(json.dumps(asked).encode())
            few = asked | {"prompt": asked["prompt"][:3]}
            statuses = [status_of(worker.ask(json.dumps(few).encode())) for _ in range(2)]
        finally:
            is_over.set()
        waiting.result()
    assert (status_of(refused), "prompt_logprobs: more than 262144" in message_of(refused)) == (400, True)
    assert statuses == [200, 200]
    assert psutil.Process().memory_info().rss - before < 200_000_000
    assert max(waits_s) < HONEST_S


# ------------------------------------------------------------------------------------------------ logits


class BrokenAfter:
    """A target that computes what is no number, from its second pass on."""

    def __init__(self, target: Target, broken: float) -> None:
        self._target, self._broken = target, broken
        self.vocab_size, self.context_limit = target.vocab_size, target.context_limit
        self.first_context = target.first_context
        self.fingerprint, self.max_rows = target.fingerprint, target.max_rows

    def limits(self, mode: Mode) -> TreeLimits:
        return self._target.limits(mode)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_BrokenSession":
        return _BrokenSession(self._target.open(prompt_ids, max_new_tokens, mode), self._broken)

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        for session, num_ids in prompts:
            session.read(num_ids)
        return [session.score(tree) for session, tree in trees]

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        return 0

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        return self._target.kv_bytes(num_ids, mode)


class _BrokenSession:
    def __init__(self, session: TargetSession, broken: float) -> None:
        self._session, self._broken, self._num_passes = session, broken, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def score(self, tree: DraftTree) -> torch.Tensor:
        self._num_passes += 1
        logits_NV = self._session.score(tree).clone()
        if self._num_passes > 1 and self._broken == -float("inf"):
            logits_NV[:] = self._broken
        elif self._num_passes > 1:
            logits_NV[:, 7] = self._broken
        return logits_NV


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_end_their_request_and_no_other(
    worker: Worker, broken: float, temperature: float
) -> None:
    engine = worker.worker.engine
    asked = json.dumps(ASKED | {"max_tokens": 8, "speculation": "off", "temperature": temperature}).encode()
    whole, engine.decoder = engine.decoder, engine.decoder.with_target(BrokenAfter(engine.decoder.target, broken))
    try:
        response = worker.ask(asked)
    finally:
        engine.decoder = whole
    assert status_of(response) == 500  # this is no fault of the request
    assert "the target's largest logit is" in message_of(response)
    assert status_of(worker.ask(asked)) == 200
    assert_all_recorded(worker)
