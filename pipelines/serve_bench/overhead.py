"""The overhead of HTTP over the library call: the same requests to both, interleaved, one at a time, and medians.

The client is the standard library's, because its time counts as the server's and it is the fastest; it runs in this
process over one open connection.
"""

import http.client
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from omnidraft import wiring
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.ports import Sampling
from omnidraft.progress import bar
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.bench.runs import rotated
from pipelines.lib.check_result import CheckResult
from pipelines.lib.report import ms
from pipelines.serve_bench.server import ServeBenchPlan, Server, serving

REQUEST_MS, TOKEN_MS = 2.0, 0.2
PROMPT = "How many clips did Natalia sell"
WARM_UP = 3

Method = Callable[[], str]
"""One way to get the text."""


def run(plan: ServeBenchPlan) -> CheckResult:
    """Measure each method in turn and compare their texts."""
    with serving(plan, "overhead", "[recorder]\nenabled = false") as server:
        engine = wiring.engine(server.settings, CountingMetrics()).engine
        methods = _methods(engine, server, plan.tokens)
        seconds, texts = _measure(methods, plan.repeats)
    figures = figures_of(seconds, plan.tokens)
    figures["same_text"] = texts["library"] == texts["whole"] == texts["streamed"]
    return CheckResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    return {
        f"HTTP adds at most {REQUEST_MS:g} ms to a request": figures["request_ms"] <= REQUEST_MS,
        f"HTTP adds at most {TOKEN_MS:g} ms to a token of a stream": figures["streamed_token_ms"] <= TOKEN_MS,
        f"HTTP adds at most {TOKEN_MS:g} ms to a token of a whole answer": figures["whole_token_ms"] <= TOKEN_MS,
        "the text over HTTP is the library's": figures["same_text"],
    }


def _methods(engine: Engine, server: Server, tokens: int) -> dict[str, Method]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    return {
        "library, 1 token": lambda: _library(engine, 1),
        "whole, 1 token": lambda: _whole(connection, 1),
        "streamed, 1 token": lambda: _streamed(connection, 1),
        "library": lambda: _library(engine, tokens),
        "whole": lambda: _whole(connection, tokens),
        "streamed": lambda: _streamed(connection, tokens),
    }


def _measure(methods: dict[str, Method], repeats: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    seconds: dict[str, list[float]] = defaultdict(list)
    texts: dict[str, str] = {}
    with bar("overhead", (repeats + WARM_UP) * len(methods)) as advance:
        for number in range(repeats + WARM_UP):
            for name in rotated(list(methods), number):
                started = time.perf_counter()
                texts[name] = methods[name]()
                took_s = time.perf_counter() - started
                if number >= WARM_UP:
                    seconds[name].append(took_s)
                advance()
    return seconds, texts


def figures_of(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Return the figures of the report: medians of times and of paired differences."""

    def added(method: str, library: str) -> float:
        pairs = zip(seconds[method], seconds[library], strict=True)
        return median(way_s - library_s for way_s, library_s in pairs)

    short = "library, 1 token"
    request_s = {method: added(f"{method}, 1 token", short) for method in ("whole", "streamed")}
    token_s = {
        method: (added(method, "library") - request_s[method]) / (tokens - 1) for method in ("whole", "streamed")
    }
    return {
        "tokens": tokens,
        "repeats": len(seconds["library"]),
        "request_ms": ms(max(request_s.values())),
        "whole_request_ms": ms(request_s["whole"]),
        "streamed_request_ms": ms(request_s["streamed"]),
        "whole_token_ms": ms(token_s["whole"]),
        "streamed_token_ms": ms(token_s["streamed"]),
        "medians_ms": {name: ms(median(took)) for name, took in seconds.items()},
    }


def _library(engine: Engine, tokens: int) -> str:
    request = GenerationRequest(prompt=PROMPT, max_new_tokens=tokens, sampling=Sampling(0.0), seed=0, is_stored=False)
    return "".join(step.text for step in engine.stream(request).steps)


def _body(tokens: int, *, stream: bool) -> bytes:
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "seed": 0, "store": False, "stream": stream}
    return json.dumps(body).encode()


def _post(connection: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection.getresponse()


def _whole(connection: http.client.HTTPConnection, tokens: int) -> str:
    answer = json.loads(_post(connection, _body(tokens, stream=False)).read())
    text: str = answer["choices"][0]["text"]
    return text


def _streamed(connection: http.client.HTTPConnection, tokens: int) -> str:
    return "".join(_texts(_post(connection, _body(tokens, stream=True))))


def _texts(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])["choices"][0]["text"]
